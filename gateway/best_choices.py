"""`best_of`: which choices of each prompt are shown."""

from collections.abc import Sequence
from dataclasses import replace

from pdserve.engine.ranking import best_indexes, logprob_per_token
from pdserve.gateway.choice_text import ChoicePiece
from pdserve.gateway.generation_plan import GenerationPlan


def best_choices(plan: GenerationPlan, choices: Sequence[ChoicePiece]) -> tuple[GenerationPlan, list[ChoicePiece]]:
    """Return the finished `choices` that `plan` keeps, the best of each prompt first and numbered anew.

    The plan that comes with them is the same without the others.
    """
    if plan.num_kept is None:
        return plan, list(choices)
    kept: list[ChoicePiece] = []
    for start in range(0, len(choices), plan.num_choices):
        of_prompt = choices[start : start + plan.num_choices]
        kept += [of_prompt[index] for index in best_indexes(list(map(_score, of_prompt)), plan.num_kept)]
    renumbered = [choice._replace(index=index) for index, choice in enumerate(kept)]
    return replace(plan, num_choices=plan.num_kept, num_kept=None), renumbered


def _score(choice: ChoicePiece) -> float:
    return logprob_per_token([token.logprobs.logprob for token in choice.tokens if token.logprobs is not None])
