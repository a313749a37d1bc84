"""A gateway and nodes with and without their common key, as real processes."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio

from pdserve.cli.transfer_key import create_transfer_key
from pdserve.control.codec import decode, encode
from pdserve.control.messages import DecodeTask, GenerationTask, Ping, Pong, StageReport, TokenChunk
from pdserve.engine.sampling_params import SamplingParams
from pdserve.kvtransfer.curve_keys import CurveKeys, generate_keys
from pdserve.kvtransfer.sockets import present

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "transfer.key"
    create_transfer_key(path)
    return path


async def complete(url: str) -> dict[str, Any]:
    body = {"model": "test", "prompt": list(range(3, 43)), "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        answer: dict[str, Any] = await reply.json()
        return answer


def node_of(cluster: Any, node_id: str) -> dict[str, Any]:
    (node,) = (node for node in cluster.status()["nodes"] if node["node_id"] == node_id)
    return dict(node)


async def words_of(address: str, keys: CurveKeys | None) -> bytes | None:
    """Give a node work and ask how it is; return its answer, None if it has none."""
    task = GenerationTask("evil", "evil:1", (3, 4, 5), (), SamplingParams(max_tokens=100, seed=1), "", 60.0)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if keys is not None:
            present(socket, keys)
        socket.connect(address)
        for message in (DecodeTask(task, None), Ping("evil", 1)):
            await socket.send(encode(message))
        try:
            return await asyncio.wait_for(socket.recv(), 1.0 if keys is None or keys.peer_keys else 30.0)
        except TimeoutError:
            return None


async def test_gateway_and_nodes_with_one_key_work_and_hear_nobody_else(
    start_cluster: Any, tiny_model: Any, key_file: Path
) -> None:
    cluster = start_cluster(tiny_model(), 1, 1, ("--num-blocks", "100"), ("--transfer-key-file", str(key_file)))

    answer = await complete(cluster.url)

    assert len(answer["choices"][0]["token_ids"]) == 4
    assert cluster.status()["routes"] == {"disaggregated": 1, "local": 0, "migrated": 0}
    stranger = generate_keys()
    decode_node = node_of(cluster, "decode-0")
    for keys in (None, CurveKeys.from_secret(stranger.secret_key, [stranger.public_key])):
        assert await words_of(decode_node["address"], keys) is None
    cluster.wait_until(lambda: node_of(cluster, "decode-0")["refused_connections"] > 0, "the strangers are counted")
    assert node_of(cluster, "decode-0")["running"] == 0
    cluster.wait_idle()

    known = await words_of(decode_node["address"], CurveKeys.load(key_file))
    assert known is not None and isinstance(decode(known), Pong | StageReport | TokenChunk)


async def test_a_node_with_another_key_gets_no_work_and_costs_no_request(
    start_cluster: Any, tiny_model: Any, key_file: Path
) -> None:
    cluster = start_cluster(tiny_model(), 0, 1, ("--num-blocks", "100"))
    cluster.start_node("prefill", 0, "--transfer-key-file", str(key_file))
    said = "node prefill-0 is lost: it does not take this end; perhaps the keys of both ends differ, or one has none"
    cluster.wait_until(lambda: said in cluster.log("gateway"), "the gateway says that it is refused")

    answer = await complete(cluster.url)

    assert len(answer["choices"][0]["token_ids"]) == 4
    assert cluster.status()["routes"] == {"disaggregated": 0, "local": 1, "migrated": 0}
    assert [node["node_id"] for node in cluster.status()["nodes"] if node["ready"]] == ["decode-0"]
    cluster.wait_idle()


async def test_a_gateway_without_the_key_of_its_nodes_says_so_where_it_is_asked(
    start_cluster: Any, tiny_model: Any, key_file: Path
) -> None:
    cluster = start_cluster(tiny_model(), 0, 1, ("--num-blocks", "100"))
    cluster.kill("decode-0")
    cluster.start_node("decode", 0, "--transfer-key-file", str(key_file))

    reason = "1 registered nodes refuse this gateway's key"
    cluster.wait_until(lambda: reason in str(cluster.status()["not_ready_reason"]), reason)

    assert cluster.get("/ready")[0] == 503
    cluster.wait_until(lambda: "a peer was refused" in cluster.log("decode-0"), "the node says it too")
