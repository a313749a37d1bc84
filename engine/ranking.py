"""Which of several completions are the best: those with the highest logprob per token, as OpenAI defines it."""

from collections.abc import Sequence


def logprob_per_token(logprobs: Sequence[float]) -> float:
    """Return the mean; a completion without a token comes last."""
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def best_indexes(scores: Sequence[float], num_best: int) -> list[int]:
    """Return the indexes of the highest scores, the highest first; of equal ones the earlier comes first."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:num_best]
