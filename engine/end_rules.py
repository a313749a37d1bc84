"""When a sequence has ended, told by its tokens alone. Pure."""

from dataclasses import dataclass

from pdserve.engine.sequence import Sequence
from pdserve.engine.step_output import FinishReason


@dataclass(frozen=True, slots=True)
class EndRules:
    """The model's end-of-sequence ids and the longest sequence that this engine holds."""

    eos_ids: frozenset[int]
    max_len: int

    def finish_reason(self, sequence: Sequence, completes_grammar: bool = False) -> FinishReason | None:
        """Return why the last token of `sequence` ends it, or None; a complete structured answer has ended."""
        if completes_grammar:
            return FinishReason.STOP
        sampling, num_tokens = sequence.spec.sampling, len(sequence.token_ids)
        token_id, num_output_tokens = sequence.token_ids[-1], num_tokens - sequence.num_prompt_tokens
        if num_output_tokens > sampling.min_tokens:
            if token_id in self.eos_ids and not sampling.ignore_eos:
                return FinishReason.STOP
            if token_id in sampling.stop_token_ids:
                return FinishReason.STOP
        if sampling.max_tokens is not None and num_output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        if num_tokens >= self.max_len:
            return FinishReason.LENGTH
        return None
