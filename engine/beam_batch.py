"""Beam searches through one engine: beams are sequences that fork, share their blocks and copy them on write."""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from pdserve.engine.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from pdserve.engine.engine import Engine
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import StepOutput


@dataclass(slots=True)
class _Search:
    """A search, the sequences of its beams in their order, and what is known of their next tokens."""

    index: int
    spec: SequenceSpec
    search: BeamSearch
    seq_ids: list[str]
    continuations: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        return all(seq_id in self.continuations for seq_id in self.seq_ids)


def run_beam_searches(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: BeamSearchParams, max_num_seqs: int
) -> Generator[tuple[int, list[Hypothesis]], None, None]:
    """Yield the index of each prompt and its hypotheses, best first, as soon as its search has ended.

    As many searches run at once as have room for all their beams, so that none waits for another's end.

    Raises:
        InvalidRequest: the beams of one prompt can never be held here at once; nothing was searched.
    """
    for prompt in prompts:
        if max(params.beam_width / max_num_seqs, _most_blocks(engine, prompt, params) / engine.pool.num_blocks) > 1:
            raise InvalidRequest(
                "beam_width",
                f"{params.beam_width} beams of {len(prompt)} + {params.max_tokens} tokens need more than the "
                f"{engine.pool.num_blocks} KV blocks or the {max_num_seqs} sequences of a batch that there are",
            )
    waiting = deque(_search(engine, index, prompt, params) for index, prompt in enumerate(prompts))
    running: list[_Search] = []
    try:
        while waiting or running:
            while waiting and _fits(engine, [*running, waiting[0]], params, max_num_seqs):
                running.append(waiting.popleft())
                engine.add(running[-1].spec)
            _take(running, engine.step())
            for each in [each for each in running if each.is_due]:
                _grow(engine, each)
                if each.search.is_finished:
                    running.remove(each)
                    yield each.index, each.search.hypotheses
    finally:
        for seq_id in (seq_id for each in running for seq_id in each.seq_ids):
            engine.scheduler.abort(seq_id)


def _search(engine: Engine, index: int, prompt: tuple[int, ...], params: BeamSearchParams) -> _Search:
    search = BeamSearch(params, engine.scheduler.eos_ids)
    sampling = SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, seed=0, ignore_eos=True, speculative=False
    )
    spec = SequenceSpec(f"beam-{index}", prompt, sampling, num_candidates=search.num_candidates)
    engine.check(spec)
    return _Search(index, spec, search, [spec.seq_id])


def _take(running: list[_Search], outputs: list[StepOutput]) -> None:
    by_id = {seq_id: each for each in running for seq_id in each.seq_ids}
    for output in outputs:
        if output.failure is not None:
            raise RuntimeError(f"beam search failed: {output.failure}")
        if output.token is not None:
            by_id[output.seq_id].continuations[output.seq_id] = output.token.top_logprobs


def _grow(engine: Engine, each: _Search) -> None:
    """Let the search decide, and make the sequences follow."""
    each.search.advance([each.continuations.pop(seq_id) for seq_id in each.seq_ids])
    beams = [] if each.search.is_finished else each.search.beams
    chosen = [(each.seq_ids[beam.parent], beam.token_ids[-1]) for beam in beams]
    each.seq_ids = engine.scheduler.regrow(each.seq_ids, chosen)


def _fits(engine: Engine, searches: list[_Search], params: BeamSearchParams, max_num_seqs: int) -> bool:
    num_blocks = sum(_most_blocks(engine, each.spec.prompt_token_ids, params) for each in searches)
    return len(searches) * params.beam_width <= max_num_seqs and num_blocks <= engine.pool.num_blocks


def _most_blocks(engine: Engine, prompt: tuple[int, ...], params: BeamSearchParams) -> int:
    """Blocks that the beams of a prompt can hold: its full ones once, and the rest of each beam, copied or growing."""
    block_size = engine.facts.block_size
    shared, rest = divmod(len(prompt), block_size)
    return shared + params.beam_width * (-(-(rest + params.max_tokens) // block_size) + 1)
