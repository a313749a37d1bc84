"""Who is served first, who gives way, who never waits for ever: pure decisions over random events and virtual time."""

from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scheduler_config import SchedulerConfig, SchedulingPolicy
from pdserve.engine.sequence import SequenceSpec, SequenceStatus
from pdserve.engine.sequence_queue import size_of
from pdserve.engine.step_output import SampledToken, StepOutput

_BLOCK_SIZE = 4


def _scheduler(num_blocks: int, config: SchedulerConfig) -> Scheduler:
    pool = BlockPool(num_blocks)
    return Scheduler(config, pool, PrefixTree(pool, _BLOCK_SIZE), _BLOCK_SIZE, frozenset())


def _spec(seq_id: str, num_prompt: int, max_tokens: int, priority: int = 0) -> SequenceSpec:
    prompt = tuple(crc32(f"{seq_id} {place}".encode()) for place in range(num_prompt))
    return SequenceSpec(seq_id, prompt, SamplingParams(max_tokens=max_tokens, seed=0, priority=priority))


def _finish(scheduler: Scheduler, batch: ScheduledBatch) -> list[StepOutput]:
    return scheduler.update(batch, [SampledToken(9) if span.sampling is not None else None for span in batch.spans])


def _first_token_steps(scheduler: Scheduler, limit: int = 20_000) -> dict[str, int]:
    """Run to the end; return in which step each sequence got its first token."""
    steps: dict[str, int] = {}
    for number in range(limit):
        if not scheduler.has_work:
            return steps
        for output in _finish(scheduler, scheduler.schedule()):
            if output.token is not None:
                steps.setdefault(output.seq_id, number)
    raise AssertionError("no end in sight")


def test_smaller_priority_is_served_first() -> None:
    scheduler = _scheduler(100, SchedulerConfig(1, 64, 400, policy=SchedulingPolicy.PRIORITY))
    for name, priority in (("late", 5), ("middle", 0), ("first", -3), ("middle too", 0)):
        scheduler.add(_spec(name, 8, 2, priority))

    steps = _first_token_steps(scheduler)

    assert sorted(steps, key=steps.__getitem__) == ["first", "middle", "middle too", "late"]


def test_last_in_priority_gives_its_blocks_away() -> None:
    scheduler = _scheduler(8, SchedulerConfig(8, 64, 400, policy=SchedulingPolicy.PRIORITY))
    scheduler.add(_spec("unimportant", 4, 20, 7))
    scheduler.add(_spec("urgent", 4, 20, -7))
    ends: list[str] = []

    while scheduler.has_work:
        outputs = _finish(scheduler, scheduler.schedule())
        ends += [output.seq_id for output in outputs if output.finish_reason is not None]

    assert scheduler.num_preemptions > 0
    assert ends == ["urgent", "unimportant"]


def test_resumed_sequence_computes_prompt_and_outputs_again_before_it_samples() -> None:
    """C130: after a preemption nothing is sampled until every token has its keys and values again."""
    scheduler = _scheduler(32, SchedulerConfig(8, 16, 128))
    for name in ("a", "b"):
        scheduler.add(_spec(name, 3, 110))
    positions: dict[str, list[int]] = {"a": [], "b": []}
    num_computed = {"a": 0, "b": 0}

    while scheduler.has_work:
        batch = scheduler.schedule()
        for span in batch.spans:
            assert span.start <= num_computed[span.seq_id], "a hole"  # a preempted one begins at its cached blocks
            num_computed[span.seq_id] = span.start + len(span.token_ids)
            known = 3 + len(positions[span.seq_id])
            assert (span.sampling is not None) == (num_computed[span.seq_id] == known)
        for output in _finish(scheduler, batch):
            if output.token is not None:
                positions[output.seq_id].append(output.output_position)

    assert scheduler.num_preemptions > 0
    assert positions == {"a": list(range(110)), "b": list(range(110))}


def test_priority_under_fcfs_is_refused_unless_it_is_zero() -> None:
    scheduler = _scheduler(8, SchedulerConfig(8, 64, 400))
    scheduler.add(_spec("a", 4, 2, 0))

    with pytest.raises(InvalidRequest) as error:
        scheduler.add(_spec("b", 4, 2, 1))

    assert error.value.field == "priority"


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_flood_of_long_prompts_does_not_hold_up_short_ones(share: float) -> None:
    """Virtual time in steps: the short prompt behind forty long ones is answered at once, or after all of them."""
    scheduler = _scheduler(10_000, SchedulerConfig(64, 64, 2000, short_prompt_share=share))
    for index in range(40):
        scheduler.add(_spec(f"long {index}", 640, 1))
    scheduler.add(_spec("short", 20, 1))

    steps = _first_token_steps(scheduler)

    assert steps["short"] == (0 if share else 400)
    # The first long one gets the other half of the budget as long as the short one lasts: no more than a step later.
    assert steps["long 0"] <= 10
    assert max(steps.values()) <= 401


def test_flood_of_short_prompts_does_not_hold_up_a_long_one() -> None:
    scheduler = _scheduler(10_000, SchedulerConfig(64, 64, 2000))
    scheduler.add(_spec("long", 640, 1))
    number, first_token = 0, None
    while first_token is None and number < 100:
        for index in range(8):
            scheduler.add(_spec(f"short {number} {index}", 16, 1))
        outputs = _finish(scheduler, scheduler.schedule())
        if any(output.seq_id == "long" and output.token is not None for output in outputs):
            first_token = number
        number += 1

    assert first_token is not None and first_token <= 640 / 32


def test_long_prompt_without_room_is_overtaken_for_a_while_and_then_has_the_blocks() -> None:
    scheduler = _scheduler(40, SchedulerConfig(8, 64, 160))
    scheduler.add(_spec("holds much", 80, 60))
    _finish(scheduler, scheduler.schedule())
    scheduler.add(_spec("long", 120, 1))
    waited = 0
    while scheduler.block_table("long") == ():
        scheduler.add(_spec(f"short {waited}", 8, 30))
        _finish(scheduler, scheduler.schedule())
        waited += 1
        assert waited < 1000, "starved"

    assert waited < 400


@pytest.mark.parametrize("reserve", [0.0, 1.0])
def test_reserve_for_growth_prevents_a_cascade_of_preemptions(reserve: float) -> None:
    """Sixty-four sequences that grow to 128 tokens each share blocks for twenty."""
    scheduler = _scheduler(700, SchedulerConfig(64, 256, 400, growth_reserve=reserve))
    for index in range(64):
        scheduler.add(_spec(str(index), 8, 128))

    num_steps = max(_first_token_steps(scheduler).values())

    if reserve:
        assert scheduler.num_preemptions == 0
    else:
        assert scheduler.num_preemptions > 40
    assert num_steps < 2000


def test_reserve_learns_that_outputs_are_longer_than_expected() -> None:
    scheduler = _scheduler(700, SchedulerConfig(64, 256, 2000, growth_reserve=1.0))
    for index in range(32):
        scheduler.add(_spec(str(index), 8, 800))

    _first_token_steps(scheduler)

    assert 0 < scheduler.num_preemptions <= 32


def test_reserve_learns_that_outputs_are_short() -> None:
    scheduler = _scheduler(400, SchedulerConfig(64, 256, 1000, growth_reserve=1.0))
    for index in range(200):
        sampling = SamplingParams(max_tokens=400, stop_token_ids=(9,), seed=0)
        scheduler.add(SequenceSpec(str(index), _spec(str(index), 8, 1).prompt_token_ids, sampling))
    widths = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        widths.append(len(batch.spans))
        _finish(scheduler, batch)

    assert widths[0] < 15 and max(widths) > 25


def test_waiting_longer_than_the_limit_ends_a_sequence_with_its_own_code() -> None:
    scheduler = _scheduler(100, SchedulerConfig(1, 64, 400, max_waiting_s=5.0))
    scheduler.add(_spec("runs", 8, 300), now=0.0)
    _finish(scheduler, scheduler.schedule(0.0))
    scheduler.add_branches([_spec("waits", 8, 2), _spec("waits too", 8, 2)], now=1.0)

    assert scheduler.next_expiry() == 6.0
    assert scheduler.expire(5.9) == []
    outputs = scheduler.expire(6.0)

    assert [(output.seq_id, output.failure_code) for output in outputs] == [
        ("waits", "queue_timeout"),
        ("waits too", "queue_timeout"),
    ]
    assert scheduler.num_sequences == 1 and scheduler.next_expiry() is None
    scheduler.check_integrity()


def test_time_in_the_queue_is_told_with_the_first_token() -> None:
    scheduler = _scheduler(100, SchedulerConfig(4, 8, 400))
    scheduler.add(_spec("a", 12, 3), now=10.0)

    told = []
    for now in (12.5, 13.0, 14.0, 15.0):
        told += [output.queue_s for output in _finish(scheduler, scheduler.schedule(now))]

    assert told == [2.5, 2.5, None, None]


_arrivals = st.lists(
    st.tuples(
        st.sampled_from(["add", "branches", "import", "commit", "abort", "step", "step", "step"]),
        st.integers(1, 30),  # prompt tokens
        st.integers(-2, 2),  # priority
    ),
    max_size=60,
)
_configs = st.builds(
    SchedulerConfig,
    st.integers(1, 5),
    st.integers(1, 24),
    st.just(64),
    policy=st.just(SchedulingPolicy.PRIORITY),
    short_prompt_share=st.sampled_from([0.0, 0.5, 1.0]),
    tpot_target_s=st.sampled_from([None, 0.02]),
    ttft_target_s=st.sampled_from([None, 0.001, 0.05, 0.2]),
    growth_reserve=st.sampled_from([0.0, 0.5, 1.0]),
    max_waiting_s=st.sampled_from([None, 0.5]),
)


class _Drive:
    """Random events on a scheduler; every step is checked."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self.config = config
        self.scheduler = _scheduler(num_blocks, config)
        self.now = 0.0
        self.open: dict[str, int] = {}  # priorities
        self.granted: list[str] = []
        self.batches: list[ScheduledBatch] = []

    def act(self, number: int, action: str, size: int, priority: int) -> None:
        name = str(number)
        if action == "add":
            self.scheduler.add(_spec(name, size, 1 + size % 7, priority), self.now)
            self.open[name] = priority
        elif action == "branches":
            specs = [_spec(f"{name}.{branch}", size, 1 + size % 4, priority) for branch in range(3)]
            prompt = specs[0].prompt_token_ids
            self.scheduler.add_branches([SequenceSpec(spec.seq_id, prompt, spec.sampling) for spec in specs], self.now)
            self.open |= {spec.seq_id: priority for spec in specs}
        elif action == "import":
            self.scheduler.add_import(_spec(name, size, 2 + size % 5, priority))
            self.open[name] = priority
        elif action == "commit" and self.granted:
            self.commit(self.granted.pop(0))
        elif action == "abort" and self.open:
            name = sorted(self.open)[size % len(self.open)]
            self.scheduler.abort(name)
            del self.open[name]
        elif action == "step":
            self.step()
        self.granted += [seq_id for seq_id, _ in self.scheduler.grant_imports()]
        self.check()

    def commit(self, name: str) -> None:
        if self.scheduler.block_table(name):
            self.scheduler.commit_import(name, [9])

    def step(self) -> int:
        before = set(self.running())
        for output in self.scheduler.expire(self.now):
            self.open.pop(output.seq_id)
        batch = self.scheduler.schedule(self.now)
        self.batches.append(batch)
        self.check_batch(batch)
        self.check_order(set(self.running()) - before)
        self.now += 0.01 + 0.001 * batch.num_tokens
        for output in _finish(self.scheduler, batch):
            if output.finish_reason is not None:
                self.open.pop(output.seq_id, None)
        self.scheduler.observe(batch, 0.01 + 0.001 * batch.num_tokens)
        return batch.num_tokens

    def running(self) -> list[str]:
        return [sequence.seq_id for sequence in self.scheduler._queues.running]

    def check_batch(self, batch: ScheduledBatch) -> None:
        computed = [span for span in batch.spans if span.token_ids]
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        assert len({span.seq_id for span in computed}) == len(computed) <= self.config.max_num_seqs
        for span in computed:
            assert len(span.block_table) == -(-(span.start + len(span.token_ids)) // _BLOCK_SIZE)

    def check_order(self, started: set[str]) -> None:
        """Nobody was started before a more urgent one that holds nothing, unless its blocks had come already."""
        waiting = [sequence.rank[0] for sequence in self.scheduler._queues.waiting if not sequence.num_output_tokens]
        for name in started:
            sequence = self.scheduler.sequence(name)
            assert sequence is not None
            if sequence.num_computed_tokens < sequence.num_prompt_tokens and not self.scheduler.num_preemptions:
                assert all(sequence.rank[0] <= priority for priority in waiting)

    def check_lateness(self) -> None:
        """Both orders of those that wait are kept; late is who waits to be started first, or runs and was so."""
        waiting = self.scheduler._queues.waiting
        assert list(waiting) == sorted(waiting, key=lambda each: each.rank)
        assert [each for _, each in waiting._by_size] == sorted(waiting, key=size_of)
        late = [each for each in self.scheduler._sequences.values() if each.rank.is_late]
        assert not late or self.config.ttft_target_s is not None
        for sequence in late:
            is_started = sequence.status in (SequenceStatus.RUNNING, SequenceStatus.EXPORTING)
            assert is_started or (sequence.queue_s is None and not sequence.num_output_tokens)
            assert all(follower.rank.is_late for follower in sequence.followers)
        for sequence in waiting:
            assert not sequence.rank.is_late or sequence.rank.priority in self.scheduler._late._late

    def check(self) -> None:
        self.check_lateness()
        self.scheduler.check_integrity()
        usage = self.scheduler.pool.usage()
        assert usage.free + usage.cached + usage.in_use + usage.in_flight == usage.total


@settings(max_examples=150, deadline=None)
@given(_arrivals, _configs, st.integers(17, 30))
def test_whatever_arrives_order_budget_and_blocks_hold_and_everything_ends(
    events: list[tuple[str, int, int]], config: SchedulerConfig, num_blocks: int
) -> None:
    drive = _Drive(config, num_blocks)
    for number, (action, size, priority) in enumerate(events):
        drive.act(number, action, size, priority)

    for _ in range(3000):  # then every transfer ends, and so does every sequence
        drive.granted += [seq_id for seq_id, _ in drive.scheduler.grant_imports()]
        while drive.granted:
            drive.commit(drive.granted.pop(0))
        if drive.scheduler.num_sequences == 0:
            break
        drive.step()
        drive.check()

    assert drive.scheduler.num_sequences == 0 and not drive.open
    usage = drive.scheduler.pool.usage()
    assert usage.in_use == usage.in_flight == 0


@settings(max_examples=100, deadline=None)
@given(_arrivals, _configs, st.integers(17, 30))
def test_a_target_that_everybody_keeps_changes_no_batch(
    events: list[tuple[str, int, int]], config: SchedulerConfig, num_blocks: int
) -> None:
    drives = [_Drive(replace(config, ttft_target_s=target_s), num_blocks) for target_s in (None, 3600.0)]
    for number, (action, size, priority) in enumerate(events):
        for drive in drives:
            drive.act(number, action, size, priority)

    assert drives[0].batches == drives[1].batches
