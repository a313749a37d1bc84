"""How likely a continuation is: the result of `LLM.score`."""

from dataclasses import dataclass

from pdserve.engine.prompt_run import RequestOutput


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The logprob of each token of a continuation given all before it.

    `is_greedy`: each token is the likeliest at its place, so that greedy decoding would have written the same.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """The logprob of the whole continuation."""
        return sum(self.logprobs)

    @classmethod
    def of(cls, output: RequestOutput, num_prompt_tokens: int) -> "ScoreOutput":
        """Cut the scored continuation out of a scored prompt, of which the first tokens are the prompt proper."""
        assert output.prompt_logprobs is not None
        ids = output.prompt_token_ids
        scores = [score for score in output.prompt_logprobs[num_prompt_tokens:] if score is not None]
        pairs = zip(ids[num_prompt_tokens:], scores, strict=True)
        return cls(
            prompt_token_ids=ids[:num_prompt_tokens],
            token_ids=ids[num_prompt_tokens:],
            logprobs=tuple(score.logprob for score in scores),
            is_greedy=all(score.top_logprobs[0][0] == token_id for token_id, score in pairs),
        )
