"""kvtransfer stands alone: others can use it without the engine and without torch."""

import subprocess
import sys

import pdserve.kvtransfer

FOREIGN = ("torch", "numpy", "transformers", "redis", "aiohttp")
PARTS = ("engine", "control", "kernels", "gateway", "cli", "prefill_node", "decode_node")


def test_importing_it_imports_nothing_of_the_engine(tmp_path):
    program = "import sys, pdserve.kvtransfer; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30, cwd=tmp_path
    )

    loaded = set(result.stdout.split())
    assert "pdserve.kvtransfer.receiver" in loaded
    assert not loaded & {*FOREIGN, *(f"pdserve.{part}" for part in PARTS)}


def test_blocks_are_shipped_where_nothing_but_its_three_dependencies_can_be_imported(tmp_path):
    (tmp_path / "ship.py").write_text(_SHIP)

    result = subprocess.run(
        [sys.executable, "ship.py", *FOREIGN, "zstandard", *(f"pdserve.{part}" for part in PARTS)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )

    assert (result.stdout, result.stderr, result.returncode) == ("committed 6 blocks: b'first token'\n", "", 0)


_SHIP = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1:]:
            raise ImportError(f"{name} is not here")


sys.meta_path.insert(0, Absent())

import asyncio

import zmq.asyncio

from pdserve.kvtransfer import BlockReceiver, BlockSender, KVLayout, PeerAddress, hash_blocks

LAYOUT = KVLayout("m", num_layers=2, block_size=17, num_kv_heads=3, head_dim=20, dtype="float32")


class Sink:
    async def reserve(self, transfer_id, block_hashes, num_tokens):
        self.landed = {}
        return range(len(block_hashes))

    async def land(self, transfer_id, blocks, start):
        self.landed.update((index, bytes(block)) for index, block in blocks)

    async def commit(self, transfer_id, metadata):
        assert self.landed == {index: bytes([index]) * LAYOUT.block_size_bytes for index in range(6)}
        print(f"committed {len(self.landed)} blocks: {metadata}")

    async def release(self, transfer_id, code, message):
        print(code, message)


async def main():
    node = {"layout": LAYOUT, "incarnation": "1"}
    with zmq.asyncio.Context() as context:
        async with (
            BlockReceiver.bind(context, node_id="d", sink=Sink(), **node) as receiver,
            BlockSender(context, node_id="p", **node) as sender,
        ):
            hashes = hash_blocks(range(100), 17, "", "m")
            peer = PeerAddress(receiver.endpoint, "d", "1")
            async with await sender.offer(peer, "t", hashes, 100, 30.0) as transfer:
                await transfer.send_blocks((index, bytes([index]) * LAYOUT.block_size_bytes) for index in range(6))
                await transfer.finish(b"first token")


asyncio.run(main())
"""


def test_every_public_name_exists():
    for name in pdserve.kvtransfer.__all__:
        assert getattr(pdserve.kvtransfer, name) is not None
