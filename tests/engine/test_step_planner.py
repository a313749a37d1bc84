"""StepPlanner: what it takes as a shortcut for sequences that only decode decides nothing else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scheduler_config import SchedulerConfig
from pdserve.engine.scheduling_step import SchedulingStep
from pdserve.engine.sequence import Sequence, SequenceSpec
from pdserve.engine.step_output import SampledToken, StepOutput
from pdserve.engine.step_planner import StepPlanner

_BLOCK_SIZE = 4


class _Plain(StepPlanner):
    """The same rules for every sequence, whatever it lacks."""

    def _continue_streams(self, step: SchedulingStep) -> None:
        self._continue([each for each in self._queues.running if each.num_uncomputed_tokens == 1], step)

    def _lacking(self, step: SchedulingStep) -> list[Sequence]:
        return [each for each in self._queues.running if step.num_lacking(each)]


def _scheduler(num_blocks: int, max_num_seqs: int, budget: int, ttft_target_s: float | None) -> Scheduler:
    pool = BlockPool(num_blocks)
    config = SchedulerConfig(max_num_seqs, budget, 64, ttft_target_s=ttft_target_s)
    return Scheduler(config, pool, PrefixTree(pool, _BLOCK_SIZE), _BLOCK_SIZE, frozenset({0}))


def _plain(num_blocks: int, max_num_seqs: int, budget: int, ttft_target_s: float | None) -> Scheduler:
    plain = _scheduler(num_blocks, max_num_seqs, budget, ttft_target_s)
    plain._planner = _Plain(plain._config, plain._blocks, plain._queues, plain._room, plain._prefill_budget)
    return plain


def _specs(number: int, size: int, num_branches: int) -> list[SequenceSpec]:
    prompt = tuple(1 + size % 2 + place for place in range(size))
    sampling = SamplingParams(max_tokens=1 + size % 7, seed=0, ignore_eos=True)
    return [SequenceSpec(f"{number}.{branch}", prompt, sampling) for branch in range(num_branches)]


def _act(scheduler: Scheduler, number: int, action: str, size: int) -> tuple[ScheduledBatch, list[StepOutput]] | None:
    match action:
        case "add":
            scheduler.add(*_specs(number, size, 1), now=number)
        case "branch":
            scheduler.add_branches(_specs(number, size, 3), now=number)
        case "import":
            scheduler.add_import(*_specs(number, size, 1))
            for seq_id, _ in scheduler.grant_imports():
                scheduler.commit_import(seq_id, [9])
        case "abort":
            for branch in range(3):
                scheduler.abort(f"{size}.{branch}")
        case "step":
            batch = scheduler.schedule(now=number)
            sampled = [SampledToken(9) if span.sampling is not None else None for span in batch.spans]
            return batch, scheduler.update(batch, sampled)
    return None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "branch", "import", "abort", "step", "step", "step"]), st.integers(1, 16)),
        max_size=60,
    ),
    st.integers(6, 24),
    st.integers(1, 6),
    st.integers(1, 20),
    st.sampled_from([None, 1.0, 6.0]),
)
def test_shortcuts_decide_what_the_rules_do(
    actions: list[tuple[str, int]], num_blocks: int, max_num_seqs: int, budget: int, ttft_target_s: float | None
) -> None:
    ours = _scheduler(num_blocks, max_num_seqs, budget, ttft_target_s)
    plain = _plain(num_blocks, max_num_seqs, budget, ttft_target_s)

    for number, action in enumerate(actions):
        assert _act(ours, number, *action) == _act(plain, number, *action)
        ours.check_integrity()
    assert ours.num_preemptions == plain.num_preemptions
