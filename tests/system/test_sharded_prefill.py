"""A decode node as a real process takes the prompt of a tensor-parallel prefill node: each shard sends its heads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import zmq.asyncio

from pdserve import LLM
from pdserve.control.handover import Handover
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import DecodeTask, GenerationTask, NodeInfo, TaskFailed, TokenBatch
from pdserve.control.node_conversation import NodeConversation
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.node_reports import kv_layout, sequence_specs
from pdserve.control.redis_connection import connect
from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.sampling_params import SamplingParams
from pdserve.kvtransfer import BlockSender, KVLayout, PeerAddress, TransferError, hash_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_MAX_TOKENS = 6
_SAMPLING = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
_PROMPT = tuple(5 + (11 * index) % 150 for index in range(45))
_HEADS = ((0, 1), (1, 2))  # of the tiny model's two


def _task(attempt_id: str, prompt: tuple[int, ...]) -> GenerationTask:
    return GenerationTask(attempt_id, attempt_id, prompt, (), _SAMPLING, "", 60.0)


@dataclass
class Prefilled:
    """What a prefill engine made of a prompt: whole blocks, and the first token."""

    layout: KVLayout
    blocks: list[bytes]
    first_token: int

    def shard(self, heads: tuple[int, int]) -> tuple[KVLayout, list[bytes]]:
        """Return what the shard with these heads would hold."""
        layout = self.layout
        rows = (layout.num_layers, 2, layout.num_kv_heads, -1)
        parts = [np.frombuffer(block, np.uint8).reshape(rows)[:, :, heads[0] : heads[1]] for block in self.blocks]
        return replace(layout, head_range=heads), [np.ascontiguousarray(part).tobytes() for part in parts]


async def _prefill(model_dir: Any, task: GenerationTask, block_size: int, kv_dtype: str) -> Prefilled:
    config = EngineConfig(model_dir=model_dir, block_size=block_size, num_blocks=64, kv_cache_dtype=kv_dtype)
    async with (
        EngineThread.start(await asyncio.to_thread(Engine.load, config)) as thread,
        thread.computing(*sequence_specs(task, is_export=True)) as (stream,),
    ):
        output = await stream.next()
        while output.token is None:
            output = await stream.next()
        num_blocks = -(-len(task.prompt_token_ids) // block_size)
        blocks = [bytes(thread.block_bytes(block_id)) for block_id in output.exported_blocks[:num_blocks]]
        assert output.token.token_id is not None
        return Prefilled(kv_layout(thread), blocks, output.token.token_id)


class Node:
    """A decode node, as its gateway and as the shards of a prefill node talk to it."""

    def __init__(self, info: NodeInfo, control: NodeConversation, context: zmq.asyncio.Context) -> None:
        self.control = control
        self._info = info
        self._context = context

    async def ship(self, number: int, prefilled: Prefilled, task: GenerationTask, does_finish: bool = True) -> None:
        """Offer and send the heads of one shard; the first of them tells how the sequence goes on."""
        layout, blocks = prefilled.shard(_HEADS[number])
        async with BlockSender(self._context, node_id=f"tp/{number}", incarnation="1", layout=layout) as sender:
            peer = PeerAddress(str(self._info.transfer_endpoint), self._info.node_id, self._info.incarnation)
            tokens, digest = task.prompt_token_ids, layout.model_digest

            def hashes(block_size: int) -> list[bytes]:
                return hash_blocks(tokens, block_size, "", digest)

            transfer = await sender.offer(peer, f"transfer of {task.attempt_id}", hashes, len(tokens), 30.0)
            await transfer.send_blocks(enumerate(blocks))
            if does_finish:
                await transfer.finish(Handover(((prefilled.first_token,),)).encode())
            else:
                await transfer.abort("failed", "this shard has lost its device")


@asynccontextmanager
async def _node(cluster: Any) -> AsyncIterator[Node]:
    redis = connect(cluster.redis.url, timeout_s=30.0)
    try:
        (registered,) = await NodeRegistry(redis, Keyspace("default")).list()
    finally:
        await redis.close()
    async with AsyncExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        talk = NodeConversation.open(context, registered.info.control_endpoint, None, 30.0)
        yield Node(registered.info, await stack.enter_async_context(talk), context)


async def _tokens(node: Node, attempt_id: str) -> list[int]:
    token_ids: dict[int, int] = {}
    while True:
        message = await node.control.hear(60.0)
        assert not isinstance(message, TaskFailed), message
        for chunk in message.chunks if isinstance(message, TokenBatch) else ():
            assert chunk.attempt_id == attempt_id
            token_ids.update(enumerate(chunk.token_ids, chunk.start))
            if chunk.finish_reason is not None:
                return [token_ids[position] for position in sorted(token_ids)]


def _completed(cluster: Any) -> dict[str, int]:
    (node,) = cluster.status()["nodes"]
    return {peer["peer"]: peer["completed"] for peer in node["transfer"]["peers"]}


@pytest.mark.parametrize(("kv_dtype", "block_size"), [("float32", 4), ("int8", 16)])
async def test_two_shards_hand_one_prompt_over_to_a_real_node(
    start_cluster: Any, tiny_model: Any, kv_dtype: str, block_size: int
) -> None:
    """Their block size is another than the node's 8: heads are placed and blocks cut in one transfer."""
    model_dir, task = tiny_model(), _task("a", _PROMPT)
    options = ("--num-blocks", "60", "--block-size", "8", "--kv-cache-dtype", kv_dtype)
    cluster = start_cluster(model_dir, 0, 1, options)
    prefilled = await _prefill(model_dir, task, block_size, kv_dtype)
    async with _node(cluster) as node:
        node.control.say(DecodeTask(task, f"transfer of {task.attempt_id}"))
        async with asyncio.timeout(60):
            await asyncio.gather(*(node.ship(number, prefilled, task) for number in range(len(_HEADS))))
        token_ids = await _tokens(node, "a")

    whole = LLM(model_dir, num_blocks=60, kv_cache_dtype=kv_dtype).generate([list(_PROMPT)], _SAMPLING, use_tqdm=False)
    assert [prefilled.first_token, *token_ids] == list(whole[0].outputs[0].token_ids)
    await asyncio.to_thread(
        cluster.wait_until, lambda: _completed(cluster) == {"tp/0": 1, "tp/1": 1}, "both are counted"
    )
    await asyncio.to_thread(cluster.wait_idle)


async def test_a_shard_that_fails_ends_the_whole_and_leaves_nothing(start_cluster: Any, tiny_model: Any) -> None:
    model_dir, task = tiny_model(), _task("b", _PROMPT)
    cluster = start_cluster(model_dir, 0, 1, ("--num-blocks", "60", "--block-size", "8"))
    prefilled = await _prefill(model_dir, task, 8, "float32")
    async with _node(cluster) as node:
        node.control.say(DecodeTask(task, f"transfer of {task.attempt_id}"))
        async with asyncio.timeout(60):
            finishing = asyncio.create_task(node.ship(0, prefilled, task))
            await node.ship(1, prefilled, task, does_finish=False)
            with pytest.raises(TransferError):
                await finishing
        failed = await node.control.hear(60.0)
        while not isinstance(failed, TaskFailed):
            failed = await node.control.hear(60.0)

    assert (failed.attempt_id, failed.code, failed.retryable) == ("b", "transfer_failed", True)
    await asyncio.to_thread(cluster.wait_idle)
