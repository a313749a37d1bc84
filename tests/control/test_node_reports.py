"""The engine's words as the control plane's, from a real engine with a tiny model."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve import __version__
from pdserve.control.messages import GenerationTask, NodeRole, TokenChunk, TokenLogprobs, TransferCounts
from pdserve.control.node_config import NodeConfig
from pdserve.control.node_reports import kv_layout, node_info, node_load, sequence_specs, token_chunk
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.sampling_params import SamplingParams
from pdserve.kvtransfer.counters import TransferCounts as MovedCounts

NUM_BLOCKS = 32
PROMPT = tuple(range(10, 50))
MOVED = MovedCounts(
    bytes_sent=1, bytes_received=2, blocks_sent=3, blocks_received=6, blocks_skipped=4, open=5, completed=7, failures={}
)


@pytest.fixture
async def engine(tiny_model) -> AsyncIterator[EngineThread]:
    config = EngineConfig(model_dir=tiny_model(), block_size=16, num_blocks=NUM_BLOCKS, num_threads=1)
    loaded = await asyncio.to_thread(Engine.load, config)
    async with EngineThread.start(loaded) as running:
        yield running


def _task(**sampling: object) -> GenerationTask:
    params = SamplingParams(temperature=0.0, seed=1, ignore_eos=True, **sampling)
    return GenerationTask("r", "r:1", PROMPT, (), params, "salt", 30.0)


async def _chunks(engine: EngineThread, task: GenerationTask) -> list[TokenChunk]:
    chunks: list[TokenChunk] = []
    async with engine.computing(*sequence_specs(task)) as (stream,):
        while not chunks or chunks[-1].finish_reason is None:
            output = await stream.next()
            if output.token is not None:
                chunks.append(token_chunk(output))
    return chunks


def test_a_sequence_is_known_to_the_engine_by_its_attempt() -> None:
    task = _task(max_tokens=3)

    (spec,) = sequence_specs(task, is_export=True)

    assert (spec.seq_id, spec.prompt_token_ids, spec.output_token_ids) == ("r:1", PROMPT, ())
    assert (spec.sampling, spec.salt, spec.is_export) == (task.sampling, "salt", True)


async def test_chunks_follow_each_other_and_the_last_one_says_why(engine: EngineThread) -> None:
    chunks = await _chunks(engine, _task(max_tokens=4, logprobs=2))

    assert [chunk.start for chunk in chunks] == [0, 1, 2, 3]
    assert all(chunk.attempt_id == "r:1" and len(chunk.token_ids) == 1 for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1].finish_reason == "length"
    for chunk in chunks:
        assert chunk.logprobs is not None
        [logprobs] = chunk.logprobs
        assert isinstance(logprobs, TokenLogprobs) and logprobs.top[0] == (chunk.token_ids[0], logprobs.logprob)


async def test_who_computed_the_prompt_says_how_much_of_it_was_cached(engine: EngineThread) -> None:
    first = await _chunks(engine, _task(max_tokens=1))
    again = await _chunks(engine, _task(max_tokens=1))

    assert [chunk.num_cached_tokens for chunk in first] == [0]
    assert [chunk.num_cached_tokens for chunk in again] == [32]


async def test_an_idle_node_is_ready_and_all_its_blocks_are_accounted_for(engine: EngineThread) -> None:
    await _chunks(engine, _task(max_tokens=2))
    load = node_load(engine, MOVED, is_draining=False)

    assert (load.ready, load.running, load.waiting, load.waiting_tokens) == (True, 0, 0, 0)
    assert load.prefill_tokens_per_s is not None and load.prefill_tokens_per_s > 0
    assert load.transfer == TransferCounts(1, 2, 3, 4, 5)
    blocks = load.blocks
    assert blocks.total == blocks.free + blocks.cached + blocks.in_use + blocks.in_flight
    assert (blocks.in_use, blocks.in_flight) == (0, 0)
    assert not node_load(engine, MOVED, is_draining=True).ready


async def test_a_node_registers_where_it_is_bound_and_what_it_can_hold(engine: EngineThread) -> None:
    config = NodeConfig(node_id="d1", redis_url="redis://h", host="0.0.0.0", advertise_host="::1", model_name="m")

    info = node_info(
        config,
        NodeRole.DECODE,
        engine,
        incarnation="i1",
        control_endpoint="tcp://0.0.0.0:5",
        transfer_endpoint="tcp://0.0.0.0:6",
    )

    assert (info.control_endpoint, info.transfer_endpoint) == ("tcp://[::1]:5", "tcp://[::1]:6")
    assert (info.node_id, info.role, info.incarnation, info.model_name) == ("d1", "decode", "i1", "m")
    assert (info.block_size, info.num_blocks, info.version) == (16, NUM_BLOCKS, __version__)
    assert info.model_digest == kv_layout(engine).digest()
    assert info.max_model_len == engine.facts.max_model_len
