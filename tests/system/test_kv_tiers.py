"""Host and disk tiers and KV events of a real installation, seen through HTTP and a real subscriber."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_PROMPT = [5 + (7 * index) % 150 for index in range(43)]
_BLOCK_SIZE = 8


def test_prefixes_come_back_from_below_the_device(tiny_model: Any, start_cluster: Any, tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    options = ("--num-blocks", "12", "--block-size", str(_BLOCK_SIZE), "--max-model-len", "90")
    tiers = ("--kv-host-memory", "64KiB", "--kv-disk-dir", str(disk), "--kv-events-port", "0")
    cluster = start_cluster(tiny_model(), node_options=options + tiers)
    nodes = {node["role"]: node for node in cluster.status()["nodes"]}
    assert set(nodes["decode"]["kv_tiers"]) == {"device", "host", "disk"}

    first = _ask(cluster.url, _PROMPT)
    for number in range(8):  # takes the device, and more than the host tier
        _ask(cluster.url, [20 + number] * 60)
    second = _ask(cluster.url, _PROMPT)
    for number in range(8):
        _ask(cluster.url, [40 + number] * 60)
    streamed = _stream(cluster.url, _PROMPT)
    cluster.wait_idle()

    assert _cached(first["usage"]) == 0
    assert _cached(second["usage"]) == _cached(streamed) == 40
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    for role in ("prefill", "decode"):  # five full blocks, twice
        cluster.wait_until(lambda role=role: _num_hits(cluster, role) >= 10, f"the {role} node had the full blocks")
    cluster.wait_until(lambda: _num_skipped(cluster) >= 10, "blocks of every tier are not sent")
    assert any(disk.glob("kv-*/*.kv"))
    _check_metrics(cluster.url)
    assert {"GPU", "CPU"} <= _media(nodes["prefill"]["kv_events_replay"])


def _ask(url: str, prompt: list[int]) -> dict[str, Any]:
    with _post(url, {"prompt": prompt}) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


def _stream(url: str, prompt: list[int]) -> dict[str, Any]:
    with _post(url, {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}) as reply:
        events = [line[6:] for line in reply.read().decode().split("\n") if line.startswith("data: {")]
    usage: dict[str, Any] = json.loads(events[-1])["usage"]
    return usage


def _post(url: str, fields: dict[str, Any]) -> Any:
    body = {"model": "test", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=120)


def _cached(usage: dict[str, Any]) -> int:
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def _num_hits(cluster: Any, role: str) -> int:
    [tiers] = [node["kv_tiers"] for node in cluster.status()["nodes"] if node["role"] == role]
    hits: int = tiers["host"]["hits"] + tiers["disk"]["hits"]
    return hits


def _num_skipped(cluster: Any) -> int:
    return sum(node["transfer"]["blocks_skipped"] for node in cluster.status()["nodes"])


def _check_metrics(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        page = reply.read().decode()
    for name in ("pdserve_kv_blocks", "pdserve_kv_block_hits_total", "pdserve_kv_corrupt_blocks_total"):
        assert any(line.startswith(name) and 'tier="host"' in line for line in page.splitlines()), name


def _media(endpoint: str) -> set[str]:
    """Replay all events of a node as vLLM's subscribers do; return the media in which blocks were stored."""
    media: set[str] = set()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 60_000
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            _, sequence, payload = socket.recv_multipart()
            if sequence == (-1).to_bytes(8, "big", signed=True):
                return media
            media |= {event[6] for event in msgpack.unpackb(payload)[1] if event[0] == "BlockStored"}
