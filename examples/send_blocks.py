"""Send the blocks of two prompts that share a beginning to `receive_blocks.py`: the second time only what is missing.

python examples/send_blocks.py tcp://127.0.0.1:PORT
"""

import asyncio
import sys
from collections.abc import Sequence

import numpy as np
import zmq.asyncio

from pdserve.kvtransfer import BlockSender, KVLayout, PeerAddress, hash_blocks

LAYOUT = KVLayout("example-model", num_layers=4, block_size=16, num_kv_heads=2, head_dim=64, dtype="float32")
SHAPE = (LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.head_dim)


def compute_blocks(token_ids: Sequence[int]) -> np.ndarray:
    """Stand in for a model: one array of blocks, in which each block depends on the tokens up to its end."""
    num_blocks = -(-len(token_ids) // LAYOUT.block_size)
    blocks = np.empty((num_blocks, *SHAPE), np.float32)
    for index in range(num_blocks):
        blocks[index] = sum(token_ids[: (index + 1) * LAYOUT.block_size]) % 1_000
    return blocks


async def ship(sender: BlockSender, peer: PeerAddress, transfer_id: str, token_ids: list[int], word: bytes) -> None:
    """Offer, send what is needed, hand over."""
    hashes = hash_blocks(token_ids, LAYOUT.block_size, salt="", model_digest=LAYOUT.model_digest)
    async with await sender.offer(peer, transfer_id, hashes, len(token_ids), deadline_s=10.0) as transfer:
        needed = await transfer.granted()
        blocks = compute_blocks(token_ids)
        await transfer.send_blocks([(0, memoryview(blocks))])  # all blocks lie together: one frame, not copied
        await transfer.finish(word)
    print(f"{transfer_id}: {len(needed)} of {len(hashes)} blocks were needed", flush=True)


async def main(endpoint: str) -> None:
    """Ship two prompts of 100 and 150 tokens."""
    peer = PeerAddress(endpoint, node_id="receiver", incarnation="1")
    with zmq.asyncio.Context() as context:
        async with BlockSender(context, node_id="sender", incarnation="1", layout=LAYOUT) as sender:
            await ship(sender, peer, "first", list(range(100)), b"first")
            await ship(sender, peer, "second", list(range(150)), b"last")
            print(f"{sender.counts().bytes_sent} bytes sent", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the address that receive_blocks.py prints, tcp://127.0.0.1:PORT")
    asyncio.run(main(sys.argv[1]))
