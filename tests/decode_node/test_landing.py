"""Decode tasks and their transfers find each other on the board, whichever comes first."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdserve.control.task_branches import TaskBranches
from pdserve.decode_node.landing import LandingBoard, LandingFailure
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread, SequenceStream
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.sequence import SequenceSpec
from pdserve.kvtransfer.errors import TransferRefused

HASHES = [b"h1", b"h2"]
BRANCHES = TaskBranches(("r:1",))


@pytest.fixture
async def stream(tiny_model: Callable) -> AsyncIterator[SequenceStream]:
    config = EngineConfig(model_dir=tiny_model(), block_size=16, num_blocks=8, num_threads=1)
    loaded = await asyncio.to_thread(Engine.load, config)
    spec = SequenceSpec(
        seq_id="r:1", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=2, seed=1), salt=""
    )
    async with EngineThread.start(loaded) as engine, engine.importing(spec) as (stream,):
        yield stream


async def test_an_offer_after_its_task_finds_it_at_once(stream: SequenceStream) -> None:
    board = LandingBoard()

    with board.expect("t1", stream, HASHES, BRANCHES) as landing:
        found = await board.find("t1", timeout_s=0)

        assert found is landing is board.get("t1") is board.peek("t1")
        assert (found.stream, found.block_hashes) == (stream, HASHES)


async def test_an_offer_before_its_task_waits_for_it(stream: SequenceStream) -> None:
    board = LandingBoard()
    finding = asyncio.ensure_future(board.find("t1", timeout_s=50))
    await asyncio.sleep(0)

    with board.expect("other", stream, HASHES, BRANCHES), board.expect("t1", stream, HASHES, BRANCHES) as landing:
        assert await finding is landing


async def test_an_offer_whose_task_never_comes_is_refused_for_now_and_leaves_nothing() -> None:
    board = LandingBoard()

    for _ in range(2):
        with pytest.raises(TransferRefused) as refused:
            await board.find("t1", timeout_s=0.01)

        assert (refused.value.code, refused.value.retryable) == ("unexpected_transfer", True)


async def test_a_cancelled_offer_does_not_disturb_the_task_that_comes_later(stream: SequenceStream) -> None:
    board = LandingBoard()
    finding = asyncio.ensure_future(board.find("t1", timeout_s=50))
    await asyncio.sleep(0)
    finding.cancel()
    await asyncio.wait((finding,))

    with board.expect("t1", stream, HASHES, BRANCHES) as landing:
        assert await board.find("t1", timeout_s=0) is landing


async def test_after_its_task_a_transfer_is_refused_for_good(stream: SequenceStream) -> None:
    board = LandingBoard()
    with board.expect("t1", stream, HASHES, BRANCHES):
        pass

    assert board.peek("t1") is None
    with pytest.raises(TransferRefused) as refused:
        board.get("t1")
    assert (refused.value.code, refused.value.retryable) == ("cancelled", False)


async def test_the_first_outcome_counts(stream: SequenceStream) -> None:
    board = LandingBoard()
    with board.expect("t1", stream, HASHES, BRANCHES) as failed, board.expect("t2", stream, HASHES, BRANCHES) as landed:
        failed.fail("no_blocks", "full")
        failed.fail("cancelled", "later")
        failed.succeed()
        landed.succeed()
        landed.fail("cancelled", "later")

        assert await failed.outcome == LandingFailure("no_blocks", "full")
        assert failed.offered.is_set()
        assert await landed.outcome is None
