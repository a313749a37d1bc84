"""One end of a transfer as a process of its own, for tests that kill it. Speaks JSON lines on stdout."""

import asyncio
import json
import sys
import threading
import time

import zmq.asyncio

from pdserve.kvtransfer import (
    BlockReceiver,
    BlockSender,
    KVLayout,
    PeerAddress,
    ReceiverConfig,
    SenderConfig,
    TransferError,
    hash_blocks,
)


class ForgetfulSink:
    """Takes every block and keeps none."""

    async def reserve(self, transfer_id, block_hashes, num_tokens):
        return range(len(block_hashes))

    async def land(self, transfer_id, blocks, start):
        return None

    async def commit(self, transfer_id, metadata):
        return None

    async def release(self, transfer_id, code, message):
        return None


async def receive(context, job, layout):
    config = ReceiverConfig(lease_s=job["lease_s"])
    async with BlockReceiver.bind(
        context,
        node_id="decode-0",
        incarnation=job["incarnation"],
        layout=layout,
        sink=ForgetfulSink(),
        config=config,
    ) as receiver:
        say(endpoint=receiver.endpoint)
        if job["stall_s"]:
            await asyncio.to_thread(sys.stdin.readline)
            say(stalls=job["stall_s"])
            stall(job)
            say(stalled=job["stall_s"])
        await receiver.watch()


async def send(context, job, layout):
    options = {name: job[name] for name in ("lease_s", "uses_shortcuts", "shared_memory")}
    config = SenderConfig(**options)
    peer = PeerAddress(*job["peer"])
    async with BlockSender(
        context, node_id="prefill-0", incarnation=job["incarnation"], layout=layout, config=config
    ) as sender:
        transfers = []
        for number in range(job["num_transfers"]):
            hashes = hash_blocks([number] * 10, layout.block_size, "", layout.model_digest)
            transfer = await sender.offer(peer, f"t{number}", hashes, 10, 60.0)
            await transfer.granted()
            await transfer.send_blocks((index, bytes(layout.block_size_bytes)) for index in range(job["num_early"]))
            transfers.append(transfer)
        say(granted=job["num_transfers"])
        if job["stall_s"]:
            stall(job)
            say(finished=await finish(transfers, layout))
        await sender.watch()


async def finish(transfers, layout):
    num_finished = 0
    for transfer in transfers:
        try:
            await transfer.send_blocks((index, bytes(layout.block_size_bytes)) for index in range(3))
            await transfer.finish(b"")
            num_finished += 1
        except TransferError as error:
            print(error, file=sys.stderr)
    return num_finished


def stall(job):
    """Hold the event loop, with threads that want the interpreter for themselves."""
    until = time.monotonic() + job["stall_s"]
    hogs = [threading.Thread(target=compute, args=(until,)) for _ in range(job["num_hogs"])]
    for hog in hogs:
        hog.start()
    compute(until)
    for hog in hogs:
        hog.join()


def compute(until):
    while time.monotonic() < until:
        sum(number * number for number in range(1_000))


def say(**words):
    print(json.dumps(words), flush=True)


async def main():
    job = {
        "stall_s": 0,
        "num_hogs": 0,
        "num_early": 1,
        "uses_shortcuts": True,
        "shared_memory": "auto",
        **json.loads(sys.argv[1]),
    }
    layout = KVLayout.from_wire(job["layout"])
    with zmq.asyncio.Context() as context:
        await (send if "peer" in job else receive)(context, job, layout)


if __name__ == "__main__":
    asyncio.run(main())
