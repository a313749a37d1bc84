"""Receivers on this machine are reached by a Unix socket of which nothing stays behind."""

import signal
from pathlib import Path

import pytest

from pdserve.kvtransfer import PeerAddress, ReceiverConfig, SenderConfig
from pdserve.kvtransfer.sockets import fastest_way, shortcut_to


def test_only_loopback_has_a_shortcut_and_each_start_its_own():
    assert shortcut_to("tcp://10.0.0.1:5000", "d1") is None
    assert shortcut_to("ipc:///tmp/x", "d1") is None
    one, other = shortcut_to("tcp://127.0.0.1:5000", "d1"), shortcut_to("tcp://127.0.0.1:5000", "d2" * 60)
    assert one != other and max(len(one), len(other)) < 100  # a Unix socket's name ends at 107


def test_without_a_receiver_there_is_nothing_to_take_but_the_address():
    assert fastest_way("tcp://127.0.0.1:1", "d1") == "tcp://127.0.0.1:1"


@pytest.mark.parametrize("uses_shortcuts", [True, False])
async def test_a_transfer_takes_the_way_it_is_told(make_pair, uses_shortcuts):
    pair = await make_pair(sender_config=SenderConfig(uses_shortcuts=uses_shortcuts))
    assert fastest_way(pair.receiver.endpoint, "d1").startswith("ipc://@")
    transfer = await pair.offer()
    await transfer.send_blocks(pair.blocks())

    assert _num_connections(pair.receiver.endpoint) == (0 if uses_shortcuts else 2)

    await transfer.finish(b"")
    assert pair.sink.landed["t1"] == dict(pair.blocks())


async def test_a_killed_receiver_leaves_no_shortcut_behind(pair, process):
    async with process(pair.layout, incarnation="d9") as (child, words):
        endpoint = words["endpoint"]
        transfer = await pair.offer(peer=PeerAddress(endpoint, "decode-0", "d9"))
        await transfer.granted()
        assert fastest_way(endpoint, "d9") != endpoint

        child.send_signal(signal.SIGKILL)
        await child.wait()

        assert (await transfer.closed()).code == "peer_lost"
    assert fastest_way(endpoint, "d9") == endpoint


async def test_a_stopped_sender_is_noticed_on_tcp_too(make_pair, process):
    pair = await make_pair(receiver_config=ReceiverConfig(lease_s=1.0))
    address = [pair.receiver.endpoint, "decode-0", "d1"]
    async with process(pair.layout, peer=address, num_transfers=2, uses_shortcuts=False) as (child, _):
        child.send_signal(signal.SIGSTOP)
        await pair.sink.wait_ended("t1")
    assert pair.sink.released["t1"] == "lease_expired"


def _num_connections(endpoint):
    """Count both ends of the established TCP connections of a port."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum((each[1].endswith(port) or each[2].endswith(port)) and each[3] == "01" for each in lines)
