"""Frames over pyzmq sockets and nothing else: what benchmarks/transfer.py compares transfers with."""

import json
import resource
import sys
import time

import xxhash
import zmq
from transfer_ways import Job, make_slots

from pdserve.kvtransfer import CurveKeys, keep_frame_memory

_HIGH_WATER_MARK = 16
_SEND_BUFFER_BYTES = 256 * 1024  # of `checked`: what ours takes over loopback TCP


def send_frames(endpoint: str, job: Job) -> float:
    """Send the job's frames; return the seconds until the receiver has them all."""
    frame = memoryview(bytes(range(256)) * (job.run * job.block_bytes // 256))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        if job.way.secret_key is not None:
            keys = CurveKeys.from_secret(job.way.secret_key)
            dealer.curve_publickey = dealer.curve_serverkey = keys.public_key.encode()
            dealer.curve_secretkey = keys.secret_key.encode()
        if job.way.is_checked and job.way.transport == "tcp":
            dealer.setsockopt(zmq.SNDBUF, _SEND_BUFFER_BYTES)
        dealer.connect(endpoint)
        dealer.send(b"start")
        dealer.recv()
        started_at = time.monotonic()
        for first in range(0, job.num_blocks, job.run):
            part = frame[: (job.num_blocks - first) * job.block_bytes]
            if job.way.is_checked:
                digest = xxhash.xxh3_64_intdigest(part)
                dealer.send(digest.to_bytes(8, "little"), flags=zmq.SNDMORE)
            dealer.send(part, copy=False)
        dealer.send(b"end")
        dealer.recv()
        return time.monotonic() - started_at


def receive_frames(endpoint: str, job: Job) -> None:
    """Drop frames, or check them and copy them into slots, until told to end; say how much processor time it took."""
    slots = make_slots(job.run * job.block_bytes)
    if job.way.is_checked:
        keep_frame_memory()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        if job.way.secret_key is not None:
            router.curve_server = True
            router.curve_secretkey = job.way.secret_key.encode()
        router.bind(endpoint)
        before = cpu_seconds()
        print(json.dumps({"endpoint": router.getsockopt_string(zmq.LAST_ENDPOINT)}), flush=True)
        payload, num_frames = b"", 0
        while payload != b"end":
            identity, *checksums, frame = router.recv_multipart(copy=False)
            payload = frame.bytes if len(frame) < 16 else b""
            if payload:
                router.send_multipart([identity.bytes, b"ok"])
            elif checksums:
                if xxhash.xxh3_64_intdigest(frame.buffer) != int.from_bytes(checksums[0].bytes, "little"):
                    raise ValueError("a frame arrived as other bytes than were sent")
                slots[num_frames % len(slots)][: len(frame)] = frame.buffer
                num_frames += 1
        sys.stdin.readline()
        print(json.dumps({"cpu_s": cpu_seconds() - before}), flush=True)


def cpu_seconds() -> float:
    """Return the processor time that this process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
