"""What a beam search gives back, as vLLM's users know it."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.beam_search import Hypothesis
from pdserve.engine.step_output import FinishReason
from pdserve.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One sequence: `tokens` and `text` begin with the prompt, `token_ids` are the output alone, its EOS included."""

    tokens: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    cum_logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The sequences found for a prompt, the one with the highest score first."""

    sequences: tuple[BeamSearchSequence, ...]

    @classmethod
    def of(cls, prompt: tuple[int, ...], hypotheses: Sequence[Hypothesis], tokenizer: Tokenizer) -> "BeamSearchOutput":
        """Return the hypotheses with their text."""
        return cls(tuple(_sequence(prompt, hypothesis, tokenizer) for hypothesis in hypotheses))


def _sequence(prompt: tuple[int, ...], hypothesis: Hypothesis, tokenizer: Tokenizer) -> BeamSearchSequence:
    tokens = prompt + hypothesis.token_ids
    return BeamSearchSequence(
        tokens=tokens,
        text=tokenizer.decode(tokens),
        token_ids=hypothesis.token_ids,
        cum_logprob=hypothesis.cum_logprob,
        score=hypothesis.score,
        finish_reason=FinishReason.STOP if hypothesis.is_stopped else FinishReason.LENGTH,
    )
