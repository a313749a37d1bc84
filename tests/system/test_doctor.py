"""`pdserve doctor` against running nodes: it proves links that are sound, and names what is wrong with the others."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.transfer_key import create_transfer_key
from pdserve.control.keyspace import Keyspace
from pdserve.control.messages import NodeInfo
from pdserve.control.node_registry import NodeRegistry
from pdserve.control.redis_connection import connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def doctor(cluster: Any, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("pdserve")), "doctor", "--redis-url", cluster.redis.url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def registered(cluster: Any, node_id: str) -> NodeInfo:
    """Return what a node says of itself."""

    async def find() -> NodeInfo:
        redis = connect(cluster.redis.url, timeout_s=30.0)
        (info,) = (
            each.info for each in await NodeRegistry(redis, Keyspace("default")).list() if each.info.node_id == node_id
        )
        await redis.close()
        return info

    return asyncio.run(find())


def keep_registered(cluster: Any, info: NodeInfo) -> None:
    """Have the place of a dead node last: on a busy machine its lease would be over before anybody asks."""

    async def keep() -> None:
        redis = connect(cluster.redis.url, timeout_s=30.0)
        await NodeRegistry(redis, Keyspace("default"), lease_s=600.0).renew(info)
        await redis.close()

    asyncio.run(keep())


def test_every_link_of_a_sound_cluster_is_proven_with_keys(start_cluster: Any, tiny_model: Any, tmp_path: Path) -> None:
    key_file = tmp_path / "transfer.key"
    create_transfer_key(key_file)
    keys = ("--transfer-key-file", str(key_file))
    cluster = start_cluster(tiny_model(), 1, 2, ("--num-blocks", "60"), keys)

    result = doctor(cluster, *keys, "--json", "--probe-size", "2MiB")

    found = json.loads(result.stdout)
    assert (result.returncode, found["ok"], found["problems"]) == (0, True, []), result.stderr
    assert [node["node_id"] for node in found["nodes"]] == ["decode-0", "decode-1", "prefill-0"]
    assert all(node["is_encrypted"] for node in found["nodes"])
    assert {(link["prefill"], link["decode"]) for link in found["links"]} == {
        ("prefill-0", "decode-0"),
        ("prefill-0", "decode-1"),
    }
    for link in found["links"]:
        assert link["is_encrypted"] and link["round_trip_ms"] > 0 and link["mb_per_s"] > 0
    table = doctor(cluster, *keys)
    assert table.returncode == 0
    assert "prefill-0 -> decode-1" in table.stdout and "encrypted" in table.stdout
    cluster.wait_idle()

    cluster.wait_until(  # the doctor tried as a stranger too
        lambda: all(node["refused_connections"] > 0 for node in cluster.status()["nodes"]), "strangers are counted"
    )

    without = doctor(cluster, "--json")
    assert without.returncode == 1
    problems = [node["problem"] for node in json.loads(without.stdout)["nodes"]]
    assert len(problems) == 3 and all("perhaps the keys of both ends differ" in problem for problem in problems)
    assert not any(link["is_encrypted"] for link in json.loads(without.stdout)["links"])

    other_key = tmp_path / "other.key"
    create_transfer_key(other_key)
    cluster.start_node("prefill", 1, "--transfer-key-file", str(other_key))
    cluster.wait_until(lambda: "prefill-1" in doctor(cluster, *keys, "--json").stdout, "the fourth node is registered")
    broken = doctor(cluster, *keys, "--json", "--probe-size", "1MiB")
    assert broken.returncode == 1
    found = json.loads(broken.stdout)
    links = {(link["prefill"], link["decode"]): link for link in found["links"]}
    assert links["prefill-0", "decode-0"]["problem"] is None
    other = links["prefill-1", "decode-0"]
    assert "keys" in other["problem"] and other["differs"] == "key"
    assert {node["node_id"] for node in found["nodes"] if node["problem"]} == {"prefill-1"}


def test_another_model_is_named_by_its_field_and_a_dead_node_by_its_silence(
    start_cluster: Any, tiny_model: Any
) -> None:
    cluster = start_cluster(tiny_model(), 0, 1, ("--num-blocks", "60"))
    cluster.model_dir = tiny_model(seed=7)
    cluster.start_node("prefill", 0)
    cluster.wait_for_nodes(2)

    result = doctor(cluster, "--json")

    (link,) = json.loads(result.stdout)["links"]
    assert result.returncode == 1
    assert link["differs"] == "model_digest" and "layout_mismatch" in link["problem"]

    nowhere = doctor(cluster, "--namespace", "elsewhere")
    assert nowhere.returncode == 1 and "no node is registered" in nowhere.stderr

    info = registered(cluster, "decode-0")
    cluster.kill("decode-0")
    keep_registered(cluster, info)
    result = doctor(cluster, "--json", "--probe-timeout-s", "5")
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert any("decode-0" in problem for problem in found["problems"])
