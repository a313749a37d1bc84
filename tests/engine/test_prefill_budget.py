"""The prompt tokens of a step follow the measured time of steps; all times are virtual."""

import random

import pytest

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.prefill_budget import PrefillBudget
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledBatch
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scheduler_config import SchedulerConfig
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import SampledToken

_FIXED_S = 0.004
_STREAM_S = 0.001
_TOKEN_S = 0.0002
_CONTEXT_S = 1e-8  # for each prompt token and each token it looks back at


def _seconds(batch: ScheduledBatch) -> float:
    """Return what a step costs on a device that reads its weights once and computes each token."""
    seconds = _FIXED_S
    for span in batch.spans:
        is_stream = len(span.token_ids) == 1
        seconds += _STREAM_S if is_stream else len(span.token_ids) * (_TOKEN_S + _CONTEXT_S * span.start)
    return seconds


class _VirtualEngine:
    """A scheduler on virtual time; remembers when each stream got its tokens."""

    def __init__(self, target_s: float | None, noise: float = 0.0) -> None:
        pool = BlockPool(4000)
        config = SchedulerConfig(64, 2048, 16_000, tpot_target_s=target_s)
        self.scheduler = Scheduler(config, pool, PrefixTree(pool, 16), 16, frozenset())
        self.now = 0.0
        self.gaps: dict[str, list[float]] = {}
        self.prompt_tokens = 0
        self._last: dict[str, float] = {}
        self._random = random.Random(0)
        self._noise = noise

    def add(self, seq_id: str, num_prompt: int, max_tokens: int) -> None:
        prompt = tuple(self._random.randrange(10**6) for _ in range(num_prompt))
        self.scheduler.add(SequenceSpec(seq_id, prompt, SamplingParams(max_tokens=max_tokens, seed=0)), self.now)

    def step(self) -> None:
        batch = self.scheduler.schedule(self.now)
        seconds = _seconds(batch) * (1 + self._noise * self._random.uniform(-1, 1))
        self.now += seconds
        self.prompt_tokens += sum(len(span.token_ids) for span in batch.spans if len(span.token_ids) > 1)
        sampled = [SampledToken(1) if span.sampling is not None else None for span in batch.spans]
        for output in self.scheduler.update(batch, sampled):
            if output.token is not None:
                if output.seq_id in self._last:
                    self.gaps.setdefault(output.seq_id, []).append(self.now - self._last[output.seq_id])
                self._last[output.seq_id] = self.now
        self.scheduler.observe(batch, seconds)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_streams_stay_under_the_target_while_long_prompts_arrive(noise: float) -> None:
    engine = _VirtualEngine(0.05, noise)
    streams = [f"stream {index}" for index in range(16)]
    for name in streams:
        engine.add(name, 2, 2000)
    for _ in range(20):
        engine.step()
    for index in range(6):
        engine.add(f"long {index}", 8000, 1)

    started = engine.now
    while any(engine.scheduler.block_table(f"long {index}") is not None for index in range(6)):
        engine.step()

    mean_gaps = [sum(engine.gaps[name]) / len(engine.gaps[name]) for name in streams]
    assert max(mean_gaps) < 0.05
    assert max(max(engine.gaps[name]) for name in streams) < 0.05 * (1.2 + noise)
    # What the target leaves beside the streams is used: the rate is near that of a device that wastes nothing of it.
    room_s = 0.05 - _FIXED_S - 16 * _STREAM_S
    best_rate = room_s / (_TOKEN_S + _CONTEXT_S * 4000) / 0.05
    assert 6 * 8000 / (engine.now - started) > 0.75 * best_rate


def test_without_a_target_long_prompts_hold_streams_up() -> None:
    engine = _VirtualEngine(None)
    engine.add("stream", 2, 2000)
    for _ in range(5):
        engine.step()
    engine.add("long", 8000, 1)

    while engine.scheduler.block_table("long") is not None:
        engine.step()

    assert max(engine.gaps["stream"]) > 0.3


def test_more_streams_leave_less_for_prompts_before_a_step_is_too_long() -> None:
    budget = PrefillBudget(0.1, 4096, 16)
    for _ in range(30):
        budget.observe(budget.tokens(1), 1, 0.01 + 0.0001 * budget.tokens(1))
        budget.observe(0, 1, 0.01)
    before = budget.tokens(1)
    for _ in range(60):
        budget.observe(0, 32, 0.06)

    assert before == pytest.approx(800, rel=0.02)
    assert budget.tokens(32) == pytest.approx(300, rel=0.02)


def test_end_of_a_prompt_says_nothing_of_longer_steps() -> None:
    budget = PrefillBudget(0.1, 4096, 16)
    for _ in range(30):
        budget.observe(budget.tokens(1), 1, 0.0001 * budget.tokens(1))
    before = budget.tokens(1)

    budget.observe(3, 1, 0.05)

    assert budget.tokens(1) == before


def test_prompts_go_on_where_streams_alone_take_longer_than_the_target() -> None:
    budget = PrefillBudget(0.01, 512, 16)
    for _ in range(10):
        budget.observe(0, 8, 0.5)
        budget.observe(budget.tokens(8), 8, 0.6)

    assert budget.tokens(8) == 16
    assert budget.tokens(0) == 512
