"""Prompts that cannot keep the target for first tokens wait behind those that can, and not for ever: virtual time."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from zlib import crc32

import pytest

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scheduler_config import SchedulerConfig, SchedulingPolicy
from pdserve.engine.sequence import Sequence, SequenceSpec, SequenceStatus
from pdserve.engine.step_output import SampledToken, StepOutput

_BLOCK_SIZE = 4
_STEP_S = 0.01  # of a step, and
_TOKEN_S = 0.001  # of each of its tokens
_TARGET_S = 1.0
_BUDGET = 64
_RATE = _BUDGET / (_STEP_S + _BUDGET * _TOKEN_S)  # prompt tokens a second at most


def _scheduler(config: SchedulerConfig, num_blocks: int = 4000) -> Scheduler:
    pool = BlockPool(num_blocks)
    return Scheduler(config, pool, PrefixTree(pool, _BLOCK_SIZE), _BLOCK_SIZE, frozenset())


def _one_at_a_time(policy: SchedulingPolicy = SchedulingPolicy.FCFS) -> Scheduler:
    return _scheduler(SchedulerConfig(1, _BUDGET, 4000, ttft_target_s=_TARGET_S, policy=policy))


def _spec(name: str, num_prompt: int, max_tokens: int = 1, priority: int = 0) -> SequenceSpec:
    prompt = (crc32(name.encode()),) * num_prompt
    return SequenceSpec(name, prompt, SamplingParams(max_tokens=max_tokens, seed=0, priority=priority))


def _finish(scheduler: Scheduler, batch: ScheduledBatch) -> list[StepOutput]:
    return scheduler.update(batch, [SampledToken(9) if span.sampling is not None else None for span in batch.spans])


def _measure_rate(scheduler: Scheduler) -> float:
    """Compute a long prompt, with the time that each of its steps takes; return when it is done."""
    scheduler.add(_spec("measured", 1024), now=0.0)
    now = 0.0
    while scheduler.has_work:
        batch = scheduler.schedule(now)
        _finish(scheduler, batch)
        now += _STEP_S + _TOKEN_S * batch.num_tokens
    return now


def _sequence(scheduler: Scheduler, name: str) -> Sequence:
    sequence = scheduler.sequence(name)
    assert sequence is not None
    return sequence


class _Overload:
    """Prompts of 16 to 112 tokens that arrive at `load` times the rate at which they can be computed."""

    def __init__(self, scheduler: Scheduler, load: float, num_prompts: int | None = None) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.ttfts: dict[int, float] = {}  # by arrival
        self._interval_s = 64 / (load * _RATE)
        self._arrivals: Iterator[int] = iter(count() if num_prompts is None else range(num_prompts))
        self._next: int | None = next(self._arrivals)

    def step(self) -> None:
        while self._next is not None and self._next * self._interval_s <= self.now:
            num_tokens = 16 + 48 * (crc32(str(self._next).encode()) % 3)
            self.scheduler.add(_spec(str(self._next), num_tokens), self._next * self._interval_s)
            self._next = next(self._arrivals, None)
        batch = self.scheduler.schedule(self.now)
        self.now += _STEP_S + _TOKEN_S * batch.num_tokens
        for output in _finish(self.scheduler, batch):
            number = int(output.seq_id)
            if output.token is not None:
                self.ttfts[number] = self.now - number * self._interval_s


@pytest.mark.parametrize(("short_prompt_share", "gain"), [(0.0, 3.0), (0.5, 1.7)])
def test_most_of_an_overload_is_in_time_with_the_target_and_little_without(
    short_prompt_share: float, gain: float
) -> None:
    shares = {}
    for target_s in (None, _TARGET_S):
        config = SchedulerConfig(
            64, _BUDGET, 4000, False, short_prompt_share=short_prompt_share, ttft_target_s=target_s
        )
        overload = _Overload(_scheduler(config), 1.5, num_prompts=400)
        while len(overload.ttfts) < 400:
            overload.step()
            assert overload.now < 1000, "starved"

        assert overload.scheduler.num_sequences == 0
        shares[target_s] = sum(1 for ttft in overload.ttfts.values() if ttft <= _TARGET_S) / 400
        overload.scheduler.check_integrity()

    # Two thirds of the tokens can be computed in time, of which late prompts are given a ninth.
    assert shares[_TARGET_S] > 0.55
    assert shares[_TARGET_S] > gain * shares[None]


@pytest.mark.parametrize("load", [1.2, 3.0])
def test_late_prompts_are_all_served_although_the_overload_never_ends(load: float) -> None:
    overload = _Overload(_scheduler(SchedulerConfig(64, _BUDGET, 4000, False, ttft_target_s=_TARGET_S)), load)
    for _ in range(1500):
        overload.step()

    # Each is served at the latest when the late ones before it have had their ninth of the rate.
    num_reached = int(overload.now * _RATE / 9 / 64)
    assert num_reached > 100
    assert all(number in overload.ttfts for number in range(num_reached))


def test_what_is_late_stands_behind_in_rank_and_in_size() -> None:
    scheduler = _one_at_a_time()
    scheduler.add(_spec("runs", 8, 30), now=0.0)
    _finish(scheduler, scheduler.schedule(0.0))
    scheduler.add(_spec("long before", 80), now=0.2)
    scheduler.add(_spec("short before", 8), now=0.2)
    scheduler.add(_spec("after", 60), now=1.0)

    _finish(scheduler, scheduler.schedule(1.2))

    waiting = scheduler._queues.waiting
    assert [sequence.seq_id for sequence in waiting] == ["after", "long before", "short before"]
    assert waiting.shortest is _sequence(scheduler, "after")


def test_a_long_prompt_is_late_before_a_short_one_of_the_same_age() -> None:
    scheduler = _one_at_a_time()
    start = _measure_rate(scheduler)
    scheduler.add(_spec("runs", 8, 30), now=start)
    for name, num_prompt in (("too long", 2000), ("long", 400), ("short", 8)):
        scheduler.add(_spec(name, num_prompt), now=start)

    late = []
    for wait_s in (0.1, 0.7, 1.0):
        _finish(scheduler, scheduler.schedule(start + wait_s))
        late.append({name for name in ("too long", "long", "short") if _sequence(scheduler, name).rank.is_late})

    assert late == [{"too long"}, {"too long", "long"}, {"too long", "long", "short"}]


def test_only_the_wait_counts_while_no_rate_is_known() -> None:
    scheduler = _one_at_a_time()
    scheduler.add(_spec("runs", 8, 30), now=0.0)
    scheduler.add(_spec("long", 2000), now=0.0)

    _finish(scheduler, scheduler.schedule(0.7))
    was_late = _sequence(scheduler, "long").rank.is_late
    _finish(scheduler, scheduler.schedule(1.0))

    assert not was_late and _sequence(scheduler, "long").rank.is_late


def test_what_is_cached_takes_no_time() -> None:
    scheduler = _one_at_a_time()
    start = _measure_rate(scheduler)
    scheduler.add(_spec("runs", 8, 30), now=start)
    scheduler.add(replace(_spec("measured", 1024), seq_id="again"), now=start)
    scheduler.add(_spec("new", 1024), now=start)

    _finish(scheduler, scheduler.schedule(start + 0.5))

    assert _sequence(scheduler, "new").rank.is_late
    assert not _sequence(scheduler, "again").rank.is_late


def test_a_late_prompt_of_a_more_urgent_priority_still_comes_first() -> None:
    scheduler = _one_at_a_time(SchedulingPolicy.PRIORITY)
    scheduler.add(_spec("runs", 8, 3, -5), now=0.0)
    _finish(scheduler, scheduler.schedule(0.0))
    scheduler.add(_spec("urgent", 8, 1, -1), now=0.0)
    scheduler.add(_spec("usual", 8, 1, 0), now=2.0)

    _finish(scheduler, scheduler.schedule(2.0))

    assert _sequence(scheduler, "urgent").rank.is_late
    assert scheduler._queues.waiting.first is _sequence(scheduler, "urgent")


def test_who_inherits_a_late_prompt_is_late_and_gets_its_turn() -> None:
    scheduler = _scheduler(SchedulerConfig(1, _BUDGET, 4000, short_prompt_share=0.0, ttft_target_s=_TARGET_S))
    scheduler.add(_spec("runs", 8, 4), now=0.0)
    _finish(scheduler, scheduler.schedule(0.0))
    late = _spec("late", 16)
    scheduler.add_branches([late, replace(late, seq_id="heir"), replace(late, seq_id="third")], now=0.0)
    _finish(scheduler, scheduler.schedule(2.0))

    scheduler.abort("late")

    assert all(_sequence(scheduler, name).rank.is_late for name in ("heir", "third"))
    ends: list[str] = []
    for number in range(60):  # one that is in time and as long arrives for each that is served
        scheduler.add(_spec(f"in time {number}", 16), now=2.0)
        outputs = _finish(scheduler, scheduler.schedule(2.0))
        ends += [output.seq_id for output in outputs if output.finish_reason is not None]
    assert 9 <= ends.index("heir") <= 11
    assert "third" in ends
    scheduler.check_integrity()


def test_the_turn_of_a_late_prompt_is_of_what_it_lacks_and_not_of_what_is_cached() -> None:
    config = SchedulerConfig(1, _BUDGET, 4000, short_prompt_share=0.0, ttft_target_s=_TARGET_S)
    scheduler = _scheduler(config)
    start = _measure_rate(scheduler)
    begin = _spec("measured", 1024).prompt_token_ids

    def shared(name: str) -> SequenceSpec:
        return replace(_spec(name, 16), prompt_token_ids=(*begin, *_spec(name, 16).prompt_token_ids))

    scheduler.add(_spec("runs", 8, 4), now=start)
    _finish(scheduler, scheduler.schedule(start))
    scheduler.add(shared("late"), now=start)
    _finish(scheduler, scheduler.schedule(start + 2.0))
    assert _sequence(scheduler, "late").rank.is_late

    ends: list[str] = []
    for number in range(60):  # one that is in time and lacks as much arrives for each that is served
        scheduler.add(shared(f"in time {number}"), now=start + 2.0)
        outputs = _finish(scheduler, scheduler.schedule(start + 2.0))
        ends += [output.seq_id for output in outputs if output.finish_reason is not None]
    assert 9 <= ends.index("late") <= 12


def test_imports_do_not_keep_a_late_prompt_from_its_blocks_for_ever() -> None:
    config = SchedulerConfig(4, 16, 4000, False, ttft_target_s=_TARGET_S)
    scheduler = _scheduler(config, num_blocks=12)  # for two imports, or for one and the late prompt

    def land() -> None:
        for seq_id, _ in scheduler.grant_imports():
            scheduler.commit_import(seq_id, [7])

    for number in range(2):
        scheduler.add_import(_spec(f"import {number}", 16, 3 + number))
    land()
    scheduler.add(_spec("late", 24), now=0.0)
    num_steps = 0
    while scheduler.sequence("late") is not None:  # an import waits for whatever blocks become free
        scheduler.add_import(_spec(f"import {2 + num_steps}", 16, 3 + num_steps % 2))
        land()
        _finish(scheduler, scheduler.schedule(2.0))
        num_steps += 1
        assert num_steps < 100, "starved"
    scheduler.check_integrity()


def test_a_late_prompt_that_is_half_computed_goes_on_in_its_turn() -> None:
    scheduler = _scheduler(SchedulerConfig(64, _BUDGET, 4000, False, ttft_target_s=_TARGET_S))
    scheduler.add(_spec("late", 640), now=0.0)
    _finish(scheduler, scheduler.schedule(2.0))  # nobody else waits
    assert _sequence(scheduler, "late").rank.is_late

    num_steps = 0
    while scheduler.sequence("late") is not None:
        for place in range(2):  # more than a step computes, and in time
            scheduler.add(_spec(f"{num_steps}.{place}", 64), now=2.0)
        _finish(scheduler, scheduler.schedule(2.0))
        num_steps += 1
        assert num_steps < 200, "starved"

    assert num_steps > 9 * (640 - 64) / 64  # the others had that before
    scheduler.check_integrity()


def test_a_preempted_stream_of_a_late_prompt_has_its_place_by_arrival_again() -> None:
    scheduler = _scheduler(SchedulerConfig(2, _BUDGET, 4000, ttft_target_s=_TARGET_S), num_blocks=16)
    scheduler.add(_spec("runs", 4, 3), now=0.0)
    scheduler.add(_spec("runs too", 4, 56), now=0.0)
    scheduler.add(_spec("late", 8, 30), now=0.0)
    now = 2.0
    _finish(scheduler, scheduler.schedule(0.0))
    _finish(scheduler, scheduler.schedule(now))
    assert _sequence(scheduler, "late").rank.is_late

    while scheduler.num_preemptions == 0:
        now += 0.01
        _finish(scheduler, scheduler.schedule(now))

    late = _sequence(scheduler, "late")
    assert late.status is SequenceStatus.WAITING and late.num_output_tokens > 0
    scheduler.add(_spec("new", 4), now=now)
    _finish(scheduler, scheduler.schedule(now + 5))
    assert not late.rank.is_late and scheduler._queues.waiting.first is late


def test_a_prompt_that_has_tokens_from_elsewhere_is_never_late() -> None:
    scheduler = _one_at_a_time()
    scheduler.add(_spec("runs", 8, 30), now=0.0)
    scheduler.add(replace(_spec("resumed", 8, 30), output_token_ids=(5, 6)), now=0.0)

    _finish(scheduler, scheduler.schedule(5.0))

    assert not _sequence(scheduler, "resumed").rank.is_late


def test_nothing_is_remembered_of_late_prompts_that_are_gone() -> None:
    scheduler = _one_at_a_time(SchedulingPolicy.PRIORITY)
    for number in range(200):
        scheduler.add(_spec(str(number), 40, 2, number), now=0.0)
    now = 0.0
    while scheduler.has_work:
        now += 0.1
        _finish(scheduler, scheduler.schedule(now))
    scheduler.schedule(now + 1)

    assert not scheduler._late._late and not scheduler._late._judged_at and not scheduler._late._num_others
