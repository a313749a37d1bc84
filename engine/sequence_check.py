"""What a scheduler can never compute, said before it is queued. Pure."""

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.scheduler_config import SchedulingPolicy
from pdserve.engine.sequence import SequenceSpec


def check_spec(spec: SequenceSpec, max_len: int, policy: SchedulingPolicy) -> None:
    """Check that a sequence can be computed when it is alone, where sequences of `max_len` tokens can.

    Raises:
        InvalidRequest: it never can.
    """
    num_tokens = len(spec.prompt_token_ids) + len(spec.output_token_ids)
    if not spec.prompt_token_ids:
        raise InvalidRequest("prompt", "has no tokens")
    max_tokens = spec.sampling.max_tokens
    num_least = num_tokens if max_tokens == 0 else num_tokens + 1
    num_wanted = num_least if max_tokens is None else len(spec.prompt_token_ids) + max_tokens
    if max(num_wanted, num_least) > max_len:
        raise InvalidRequest(
            "max_tokens", f"prompt and output need {num_wanted} tokens, this node holds at most {max_len}"
        )
    if spec.sampling.priority and policy is not SchedulingPolicy.PRIORITY:
        raise InvalidRequest("priority", f"must be 0: the scheduling policy here is {policy}, not priority")
