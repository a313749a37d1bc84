"""The device thread: commands between steps, streams that end with it, nothing held once a block is left."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest

from pdserve.engine import engine_thread
from pdserve.engine.block_pool import BlockUsage
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine, EngineLoad
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.errors import EngineStopped, InvalidRequest
from pdserve.engine.layer_progress import LayerProgress, LayerWatch
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import StepOutput

_DEADLINE_S = 60
_ENDLESS = SamplingParams(max_tokens=400, temperature=0.0, seed=0, ignore_eos=True)
_SHORT = SamplingParams(max_tokens=5, temperature=0.0, seed=0, ignore_eos=True)


@asynccontextmanager
async def _thread(tiny_model: Any, **options: Any) -> AsyncIterator[EngineThread]:
    config = EngineConfig(model_dir=tiny_model(), block_size=4, **{"num_blocks": 128, **options})
    async with EngineThread.start(Engine.load(config)) as thread:
        yield thread


async def _usage(thread: EngineThread) -> BlockUsage:
    return await thread.call(lambda engine: engine.pool.usage())


async def test_stream_gives_every_token_in_order(tiny_model: Any) -> None:
    async with _thread(tiny_model) as thread, thread.computing(SequenceSpec("a", (5, 6, 7), _SHORT)) as (stream,):
        outputs = [await stream.next() for _ in range(5)]

    assert [output.output_position for output in outputs] == [0, 1, 2, 3, 4]
    assert outputs[-1].finish_reason is not None


async def test_leaving_early_frees_everything(tiny_model: Any) -> None:
    async with _thread(tiny_model) as thread:
        async with thread.computing(SequenceSpec("a", (5, 6, 7), _ENDLESS)) as (stream,):
            await stream.next()
            assert (await _usage(thread)).in_use > 0

        assert (await _usage(thread)).in_use == 0
        assert await thread.call(lambda engine: engine.scheduler.num_sequences) == 0


async def test_cancelled_waiter_frees_everything(tiny_model: Any) -> None:
    async with _thread(tiny_model) as thread:

        async def generate(seq_id: str) -> None:
            async with thread.computing(SequenceSpec(seq_id, (5, 6, 7), _ENDLESS)) as (stream,):
                while True:
                    await stream.next()

        tasks = [asyncio.create_task(generate(str(number))) for number in range(8)]
        async with thread.computing(SequenceSpec("other", (9,), _SHORT)) as (stream,):
            for _ in range(5):
                await stream.next()
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert (await _usage(thread)).in_use == 0


async def test_error_of_a_command_reaches_its_caller_only(tiny_model: Any) -> None:
    async with _thread(tiny_model) as thread:
        with pytest.raises(InvalidRequest):
            async with thread.computing(SequenceSpec("bad", (10_000,), _SHORT)):
                pass

        async with thread.computing(SequenceSpec("good", (5,), _SHORT)) as (stream,):
            assert (await stream.next()).token is not None


async def test_import_is_granted_when_room_comes_free(tiny_model: Any) -> None:
    async with _thread(tiny_model, num_blocks=8) as thread:
        long = SequenceSpec("b", tuple(range(5, 25)), _SHORT)
        async with thread.importing(SequenceSpec("a", tuple(range(30, 50)), _SHORT)) as (first,):
            assert len(await first.granted) == 5
            async with thread.importing(long) as (second,):
                assert (await _usage(thread)).in_flight == 6
                assert not second.granted.done()
                await thread.call(lambda engine: engine.scheduler.abort("a"))
                assert len(await second.granted) == 5
        assert (await _usage(thread)).in_flight == 0


async def test_failed_step_ends_every_stream_and_says_so(tiny_model: Any) -> None:
    async with _thread(tiny_model) as thread:
        async with thread.computing(SequenceSpec("a", (5,), _ENDLESS)) as (stream,):
            await stream.next()

            def break_the_pool(engine: Engine) -> None:
                engine.pool._sequence_refs[0] += 1  # a leak, as a defect would make it
                engine.scheduler._sequences.clear()
                engine.scheduler._queues.running._sequences.append(None)  # type: ignore[arg-type]

            await thread.call(break_the_pool)
            with pytest.raises(EngineStopped):
                while True:
                    await stream.next()
        assert thread.failure is not None
        with pytest.raises(EngineStopped):
            await thread.call(lambda engine: None)


async def test_pending_command_is_refused_when_the_thread_ends(tiny_model: Any) -> None:
    config = EngineConfig(model_dir=tiny_model(), num_blocks=8)
    async with EngineThread.start(Engine.load(config)) as thread:
        pass

    assert thread.stopped.is_set()
    with pytest.raises(EngineStopped):
        await thread.call(lambda engine: None)


async def test_a_caller_that_gave_up_leaves_none_of_the_others_without_an_answer(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails while two commands wait, of which one is not wanted any more."""
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), num_blocks=8))
    has_begun, may_end = threading.Event(), threading.Event()

    def fail() -> NoReturn:
        has_begun.set()
        may_end.wait(_DEADLINE_S)
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "step", fail)
    async with EngineThread.start(engine) as thread, asyncio.timeout(_DEADLINE_S):
        await thread.call(lambda engine: None)
        await asyncio.to_thread(has_begun.wait, _DEADLINE_S)
        given_up, waiting = [asyncio.create_task(thread.call(lambda engine: None), name="call") for _ in range(2)]
        await asyncio.sleep(0)  # both are queued
        given_up.cancel()
        may_end.set()

        with pytest.raises(EngineStopped):
            await waiting
        assert given_up.cancelled()


async def test_end_does_not_wait_for_a_long_step(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is held at its first layer until it is told to end."""
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), num_blocks=64, max_num_batched_tokens=500))
    is_told, interrupt = threading.Event(), engine.interrupt
    monkeypatch.setattr(engine, "interrupt", lambda: (interrupt(), is_told.set()))
    begun = asyncio.Event()
    async with EngineThread.start(engine) as thread:
        loop, num_layers = asyncio.get_running_loop(), []

        def hold(progress: LayerProgress) -> None:
            num_layers.append(progress.num_layers)
            loop.call_soon_threadsafe(begun.set)
            assert is_told.wait(_DEADLINE_S)

        engine.layer_watch = LayerWatch(engine.facts.num_layers, engine.facts.block_size, lambda _: True, hold)
        spec = SequenceSpec("a", tuple(5 + i % 190 for i in range(490)), _SHORT)
        async with thread.computing(spec):
            await begun.wait()
            assert thread.progress_age_s > 0

    assert thread.failure is None
    assert num_layers == [1] and thread.load.num_running == 0, "the step was finished"


async def test_waiting_too_long_ends_although_no_step_can_be_taken(tiny_model: Any) -> None:
    """Nothing is computed and no command comes: the thread wakes up by itself."""
    async with _thread(tiny_model, num_blocks=6, max_waiting_s=1.0) as thread:
        landing = SequenceSpec("a", tuple(range(5, 24)), _SHORT)
        async with thread.importing(landing) as (first,):
            await first.granted
            async with thread.computing(SequenceSpec("b", tuple(range(5, 21)), _SHORT)) as (second,):
                output = await second.next()

    assert (output.failure_code, output.token, output.finish_reason) == ("queue_timeout", None, None)


async def test_a_follower_gets_every_token_in_order_and_no_more(tiny_model: Any) -> None:
    taken: list[int] = []

    def take(output: StepOutput) -> bool:
        taken.append(output.output_position)
        return len(taken) == 3

    async with _thread(tiny_model) as thread, thread.computing(SequenceSpec("a", (5, 6, 7), _SHORT)) as (stream,):
        first = await stream.next()
        await stream.follow(take)

    assert [first.output_position, *taken] == [0, 1, 2, 3]


async def test_what_a_follower_raises_ends_its_stream_alone(tiny_model: Any) -> None:
    def refuse(_: StepOutput) -> bool:
        raise ZeroDivisionError

    async with _thread(tiny_model) as thread:
        async with thread.computing(SequenceSpec("a", (5, 6, 7), _ENDLESS)) as (stream,):
            with pytest.raises(ZeroDivisionError):
                await stream.follow(refuse)
        async with thread.computing(SequenceSpec("b", (5, 6, 7), _SHORT)) as (stream,):
            await stream.follow(lambda output: output.finish_reason is not None)

        assert (await _usage(thread)).in_use == 0


async def test_a_follower_is_told_that_the_engine_has_stopped(tiny_model: Any) -> None:
    begun = asyncio.Event()

    def take(_: StepOutput) -> bool:
        begun.set()
        return False

    async with _thread(tiny_model) as thread:

        async def generate() -> None:
            async with thread.computing(SequenceSpec("a", (5, 6, 7), _ENDLESS)) as (stream,):
                await stream.follow(take)

        task = asyncio.create_task(generate(), name="generate")
        await begun.wait()

    with pytest.raises(EngineStopped):
        await task


async def test_the_load_of_a_steady_stream_is_renewed(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "_LOAD_INTERVAL_S", 0.0)
    seen: list[int] = []  # by the engine's thread, which may end before this one gets a turn
    load_now = Engine.load_now

    def noted(engine: Engine) -> EngineLoad:
        load = load_now(engine)
        seen.append(load.num_running)
        return load

    monkeypatch.setattr(Engine, "load_now", noted)
    spec = SequenceSpec("a", (5, 6, 7), _SHORT)
    async with _thread(tiny_model) as thread, thread.computing(spec) as (stream,), asyncio.timeout(_DEADLINE_S):
        await stream.follow(lambda output: output.finish_reason is not None)

    assert seen.count(1) >= 4  # after each step but the last


async def test_who_has_the_last_output_sees_the_load_after_it(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the threads take turns: here the event loop does all it can before the load is looked at."""
    loop, load_now = asyncio.get_running_loop(), Engine.load_now

    async def let_the_loop_run() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def late(engine: Engine) -> EngineLoad:
        if threading.current_thread().name == "engine":
            asyncio.run_coroutine_threadsafe(let_the_loop_run(), loop).result(_DEADLINE_S)
        return load_now(engine)

    monkeypatch.setattr(engine_thread, "_LOAD_INTERVAL_S", 3_600.0)
    monkeypatch.setattr(Engine, "load_now", late)
    seen: list[EngineLoad] = []
    async with _thread(tiny_model) as thread, asyncio.timeout(_DEADLINE_S):

        def take(output: StepOutput) -> bool:
            seen.append(thread.load)
            return output.finish_reason is not None

        async with thread.computing(SequenceSpec("a", tuple(range(5, 69)), _SHORT)) as (stream,):
            await stream.follow(take)

    assert seen[-1].num_running == 0
    assert seen[-1].prefill_tokens_per_s is not None, "a load from before the prompt"


async def test_what_leaks_is_found_where_no_moment_is_quiet(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "_QUIET_S", 3_600.0)
    monkeypatch.setattr(engine_thread, "_LONGEST_UNCHECKED_S", 0.0)
    async with _thread(tiny_model) as thread, asyncio.timeout(_DEADLINE_S):
        async with thread.computing(SequenceSpec("a", (5, 6, 7), _SHORT)) as (stream,):
            await stream.follow(lambda output: output.finish_reason is not None)

        await thread.call(lambda engine: engine.pool.allocate(1))
        await thread.wait_stopped()

    assert isinstance(thread.failure, RuntimeError)
