import asyncio

from pdserve.control.keyspace import Keyspace
from pdserve.control.redis_connection import connect
from pdserve.control.request_state import RequestFacts, RequestProgress, RequestStatus
from pdserve.control.request_store import RequestStore
from pdserve.gateway import request_recorder
from pdserve.gateway.request_recorder import RequestRecorder

S = RequestStatus
NO_FACTS = RequestFacts()


def _advance(recorder: RequestRecorder, progress: RequestProgress, *targets: RequestStatus) -> None:
    for target in targets:
        before = progress.status
        recorder.record(progress.request_id, before, progress.advance(target), NO_FACTS)


async def test_changes_made_while_redis_is_away_are_written_when_it_is_back(own_redis) -> None:
    redis = connect(own_redis.url, timeout_s=30.0)
    store = RequestStore(redis, Keyspace("test"))
    recorder = RequestRecorder(store)
    await store.create("kept", "g", 1)
    progress = RequestProgress("kept")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run(), name="recorder")
        own_redis.pause()
        _advance(recorder, progress, S.PREFILLING, S.TRANSFERRING, S.DECODING)
        recorder.record("kept", S.DECODING, progress.advance(S.FINISHED), RequestFacts(num_output_tokens=3))
        await recorder.flush(0.2)
        assert recorder.counts.pending == 4

        own_redis.resume()
        await recorder.flush(30)
        running.cancel()

    record = await store.get("kept")
    assert record is not None
    assert [entry.status for entry in record.story] == [
        S.QUEUED,
        S.PREFILLING,
        S.TRANSFERRING,
        S.DECODING,
        S.FINISHED,
    ]
    assert record.facts.num_output_tokens == 3
    assert recorder.counts.written == 4
    await redis.close()


async def test_a_record_that_is_gone_is_dropped_and_the_next_is_written(redis) -> None:
    store = RequestStore(redis, Keyspace("test"))
    recorder = RequestRecorder(store)
    await store.create("second", "g", 1)
    _advance(recorder, RequestProgress("first"), S.PREFILLING, S.FINISHED)
    _advance(recorder, RequestProgress("second"), S.CANCELLED)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run(), name="recorder")
        await recorder.flush(30)
        running.cancel()

    counts = recorder.counts
    assert (counts.submitted, counts.written, counts.dropped, counts.pending) == (3, 1, 2, 0)


async def test_who_was_told_of_a_change_finds_it_in_the_record(own_redis, monkeypatch) -> None:
    monkeypatch.setattr(request_recorder, "_READ_AFTER_WRITE_S", 30.0)  # a busy machine's Redis may be slow
    redis = connect(own_redis.url, timeout_s=30.0)
    store = RequestStore(redis, Keyspace("test"))
    recorder = RequestRecorder(store)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run(), name="recorder")
        for number in range(20):
            await store.create(f"r{number}", "g", 1)
            progress = RequestProgress(f"r{number}")
            _advance(recorder, progress, S.PREFILLING, S.TRANSFERRING, S.DECODING, S.FINISHED)

            record = await recorder.get(f"r{number}")

            assert record is not None and record.status is S.FINISHED
        assert await recorder.get("nobody") is None
        running.cancel()
    await redis.close()


async def test_what_waits_is_bounded_in_number_and_time() -> None:
    redis = connect("unix:///nowhere/redis.sock")
    recorder = RequestRecorder(RequestStore(redis, Keyspace("test")), max_pending=2, retry_for_s=0.1)
    for index in range(5):
        _advance(recorder, RequestProgress(str(index)), S.PREFILLING)
    assert (recorder.counts.dropped, recorder.counts.pending) == (3, 2)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run(), name="recorder")
        await recorder.flush(30)
        running.cancel()

    assert (recorder.counts.dropped, recorder.counts.pending) == (5, 0)
    await redis.close()


async def test_a_stopped_recorder_has_lost_nothing_it_was_told(own_redis) -> None:
    redis = connect(own_redis.url, timeout_s=30.0)
    recorder = RequestRecorder(RequestStore(redis, Keyspace("test")))
    own_redis.pause()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(recorder.run(), name="recorder")
        _advance(recorder, RequestProgress("r"), S.PREFILLING)
        await asyncio.sleep(0)
        running.cancel()
    own_redis.resume()

    counts = recorder.counts
    assert (counts.submitted, counts.pending) == (1, 1)
    await redis.close()
