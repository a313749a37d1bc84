"""Streams that let prompts of other processes have the cores, and still come in time."""

from pathlib import Path
from typing import Any

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_pace import StepPace

_TEN = SamplingParams(max_tokens=10, temperature=0.0, seed=0, ignore_eos=True)
_AN_HOUR_S = 3_600.0
_OTHERS_PLACE = 40


def test_the_next_step_waits_until_most_of_the_target_has_passed_since_the_last_began() -> None:
    pace = StepPace(0.1)
    assert pace.left_s(5.0) == 0.0

    pace.begin(10.0)

    assert 0.05 < pace.left_s(10.0) < 0.1
    assert pace.left_s(10.1) == 0.0


def test_without_a_target_nothing_waits() -> None:
    pace = StepPace(None)
    pace.begin(10.0)

    assert pace.left_s(10.0) == 0.0


async def test_streams_pause_while_others_compute_but_not_for_a_newcomer(tiny_model: Any, tmp_path: Path) -> None:
    shared = tmp_path / "busy"
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), block_size=4, num_blocks=128))
    async with EngineThread.start(engine, shared, _AN_HOUR_S) as thread:

        async def num_outputs(seq_id: str) -> int:
            found = {await thread.call(lambda engine: engine.scheduler.sequence(seq_id)) for _ in range(20)}
            (sequence,) = found
            assert sequence is not None
            return sequence.num_output_tokens

        _set_busy(shared, True)
        async with thread.computing(SequenceSpec("a", (5, 6, 7), _TEN)) as (first,):
            await first.next()
            assert await num_outputs("a") == 1

            async with thread.computing(SequenceSpec("b", (8, 9), _TEN)) as (second,):
                await second.next()
                assert (await num_outputs("a"), await num_outputs("b")) == (2, 1)

                _set_busy(shared, False)
                assert [(await second.next()).output_position for _ in range(9)] == list(range(1, 10))
            assert [(await first.next()).output_position for _ in range(9)] == list(range(1, 10))


def _set_busy(shared: Path, is_busy: bool) -> None:
    with shared.open("r+b") as file:
        file.seek(_OTHERS_PLACE)
        file.write(bytes([is_busy]))
