"""The best settings of a peer for one workload, found by trying: a win over a badly set peer is no win."""

from collections.abc import Awaitable, Callable, Sequence

from results import Tried

Measure = Callable[[str], Awaitable[Tried]]


async def tuned(axes: Sequence[Sequence[str]], measure: Measure, *, is_less_better: bool) -> list[Tried]:
    """Return all that was tried, the best first.

    The first line of `axes` holds names; the best of them is kept. Each further line holds options that exclude each
    other: each is appended to the best name so far, and stays if that is better. So lines are tried one after the
    other and not all combinations of them.

    Raises:
        SystemExit: nothing of the first line works.
    """
    tried: list[Tried] = []

    async def take_best(best: Tried | None, names: Sequence[str]) -> Tried | None:
        for name in names:
            one = await measure(name)
            tried.append(one)
            if one.value is not None and (best is None or best.value is None or _is_better(one.value, best.value)):
                best = one
        return best

    def _is_better(value: float, other: float) -> bool:
        return value < other if is_less_better else value > other

    best = await take_best(None, axes[0])
    if best is None:
        raise SystemExit(f"none of {', '.join(axes[0])} works: {tried[-1].error}")
    for options in axes[1:]:
        best = await take_best(best, [f"{best.name}-{option}" for option in options])
        assert best is not None
    known = [one for one in tried if one.value is not None and one is not best]
    known.sort(key=lambda one: one.value or 0.0, reverse=not is_less_better)
    return [best, *known, *(one for one in tried if one.value is None)]
