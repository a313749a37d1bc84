"""KV events of real nodes: a subscriber of vLLM's kind follows both while requests run, and knows what each holds."""

import asyncio
from typing import Any

import aiohttp
import msgpack
import pytest
import zmq
import zmq.asyncio

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_BLOCK_SIZE = 8
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class Follower:
    """Reads one node's live events for as long as it runs, then asks for what it has missed."""

    def __init__(self, context: zmq.asyncio.Context, node: dict[str, Any]) -> None:
        self.node_id = node["node_id"]
        self.live: dict[int, bytes] = {}
        self.held: dict[str, set[bytes]] = {"GPU": set()}
        self.blocks: set[tuple[int, ...]] = set()
        self.names: list[str] = []
        self._replay_endpoint = node["kv_events_replay"]
        self._context = context
        self._socket = context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.connect(node["kv_events"])
        self._socket.subscribe(f"kv@{self.node_id}@test")

    async def listen(self) -> None:
        """Take in what is published until cancelled."""
        with self._socket as socket:
            while True:
                topic, sequence, payload = await socket.recv_multipart()
                assert topic == f"kv@{self.node_id}@test".encode()
                self.live[int.from_bytes(sequence, "big")] = payload

    async def catch_up(self) -> None:
        """Ask for everything from the first batch on; follow all of it in order."""
        batches = dict(self.live)
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                _, sequence, payload = await asyncio.wait_for(socket.recv_multipart(), 60)
                if sequence == _END_OF_REPLAY:
                    break
                assert batches.setdefault(int.from_bytes(sequence, "big"), payload) == payload
        assert sorted(batches) == list(range(len(batches)))  # none is missing, none came under two numbers
        for number in range(len(batches)):
            timestamp, events, _ = msgpack.unpackb(batches[number])
            assert timestamp > 1.7e9  # seconds since 1970
            for event in events:
                self._follow(event)

    def _follow(self, event: list[Any]) -> None:
        self.names.append(event[0])
        match event:
            case ["AllBlocksCleared"]:
                self.held = {"GPU": set()}
            case ["BlockStored", hashes, parent, token_ids, block_size, None, medium, None]:
                assert block_size == _BLOCK_SIZE and len(token_ids) == len(hashes) * block_size
                assert parent is None or parent in self.held[medium]
                assert self.held[medium].isdisjoint(hashes)
                self.held[medium].update(hashes)
                self.blocks.update(
                    tuple(token_ids[start : start + block_size]) for start in range(0, len(token_ids), block_size)
                )
            case ["BlockRemoved", hashes, medium]:
                assert self.held[medium].issuperset(hashes)
                self.held[medium].difference_update(hashes)
            case _:
                raise AssertionError(event)


async def _ask(url: str, prompt: list[int]) -> None:
    body = {"model": "test", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()


def _num_cached(cluster: Any) -> dict[str, int]:
    return {node["node_id"]: node["kv_tiers"]["device"]["blocks"] for node in cluster.status()["nodes"]}


def _prompt(number: int) -> list[int]:
    return [5 + (11 * number + (3 + number % 7) * index) % 150 for index in range(4 * _BLOCK_SIZE + 1)]


async def test_a_subscriber_follows_live_nodes_and_knows_what_they_hold(start_cluster: Any, tiny_model: Any) -> None:
    """C172: what was said before anybody had subscribed comes by replay, and the numbers tell that it was missing."""
    options = ("--num-blocks", "20", "--block-size", str(_BLOCK_SIZE), "--kv-events-port", "0")
    cluster = start_cluster(tiny_model(), 1, 1, options)
    prompts = [_prompt(number) for number in range(12)]
    with zmq.asyncio.Context() as context:
        followers = [Follower(context, node) for node in cluster.status()["nodes"]]
        listening = [asyncio.create_task(follower.listen()) for follower in followers]
        try:
            for number in range(1_000):  # until both subscriptions have arrived: PUB does not say when
                await _ask(cluster.url, [5 + number % 150] * (2 * _BLOCK_SIZE))
                if all(follower.live for follower in followers):
                    break
            await asyncio.gather(*(_ask(cluster.url, prompt) for prompt in prompts))
            await asyncio.to_thread(cluster.wait_idle)
            for follower in followers:
                await follower.catch_up()
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    num_held = {follower.node_id: len(follower.held["GPU"]) for follower in followers}
    cluster.wait_until(lambda: _num_cached(cluster) == num_held, f"both nodes hold {num_held}")
    for follower in followers:
        assert follower.names[0] == "AllBlocksCleared"
        assert {"BlockStored", "BlockRemoved"} <= set(follower.names)  # 20 blocks do not hold all that was asked
        assert len(follower.live) > 1
        for prompt in prompts:
            assert tuple(prompt[:_BLOCK_SIZE]) in follower.blocks


async def test_a_node_that_starts_again_says_that_its_cache_is_empty(start_cluster: Any, tiny_model: Any) -> None:
    options = ("--num-blocks", "40", "--block-size", str(_BLOCK_SIZE), "--kv-events-port", "0")
    cluster = start_cluster(tiny_model(), 0, 1, options)
    (before,) = cluster.status()["nodes"]
    await _ask(cluster.url, _prompt(1))
    cluster.kill("decode-0")
    cluster.start_node("decode", 0)

    def is_back() -> bool:
        return any(node["incarnation"] != before["incarnation"] and node["ready"] for node in cluster.status()["nodes"])

    await asyncio.to_thread(cluster.wait_until, is_back, "the node is back")
    (after,) = (node for node in cluster.status()["nodes"] if node["incarnation"] != before["incarnation"])
    with zmq.asyncio.Context() as context:
        follower = Follower(context, after)
        listening = asyncio.create_task(follower.listen())
        await follower.catch_up()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    assert follower.names[0] == "AllBlocksCleared"
    assert tuple(_prompt(1)[:_BLOCK_SIZE]) not in follower.blocks  # what the node held before is not claimed again
