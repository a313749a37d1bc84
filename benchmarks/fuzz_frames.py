"""Coverage-guided fuzzing of what a peer can say on the KV plane: `decode`, and whole sequences of frames through the
receiver's session. Neither may raise anything but FrameError, break ownership of the slots, or be slow.

Needs atheris, which nothing else here does: pip install -r benchmarks/fuzz_requirements.txt
    python benchmarks/fuzz_frames.py -max_total_time=300 corpus/
All arguments are libFuzzer's, which -help=1 lists; docs/kv_transfer_protocol.md has the result of a run. The quick test
without atheris is tests/kvtransfer/test_fuzz.py.
"""

import sys
from contextlib import suppress

if {"-h", "--help"} & set(sys.argv[1:]):
    print(__doc__)
    raise SystemExit
try:
    import atheris  # type: ignore[import-not-found]  # optional
except ModuleNotFoundError:
    raise SystemExit("atheris is not installed: pip install -r benchmarks/fuzz_requirements.txt") from None

with atheris.instrument_imports(include=["pdserve.kvtransfer"]):
    import pdserve.kvtransfer.frames as frames
    import pdserve.kvtransfer.incoming_session as incoming
    from pdserve.kvtransfer.errors import FrameError
    from pdserve.kvtransfer.layout import KVLayout

LAYOUT = KVLayout("m", num_layers=1, block_size=2, num_kv_heads=1, head_dim=2, dtype="float16")
SIZE = LAYOUT.block_size_bytes
BLOCK = bytes(range(SIZE))
NUM_BLOCKS = 3
DEADLINE = 10.0


class Slots:
    """The slots of one transfer: free, open, or committed; each step is checked."""

    def __init__(self) -> None:
        self.state = "free"

    def perform(self, instruction: incoming.Instruction) -> incoming.Event | None:
        """Carry an instruction out; return what it leads to."""
        match instruction:
            case incoming.Land(blocks):
                assert self.state == "open" and all(bytes(block) == BLOCK for _, block in blocks)
            case incoming.Commit():
                assert self.state == "open"
                self.state = "committed"
                return incoming.Committed()
            case incoming.Release():
                assert self.state == "open"
                self.state = "free"
        return None


def run_session(data: atheris.FuzzedDataProvider) -> None:
    """Feed a transfer with what the bytes stand for, then let its deadline pass."""
    session = incoming.IncomingSession("t", NUM_BLOCKS, SIZE, deadline=DEADLINE, now=0.0)
    slots = Slots()
    slots.state = "open"
    queue: list[incoming.Event] = [incoming.Reserved((0, 1, 2))]
    while queue or data.remaining_bytes():
        event = queue.pop() if queue else next_event(data)
        if event is not None:
            for instruction in session.handle(event, 0.0):
                following = slots.perform(instruction)
                if following is not None:
                    queue.append(following)
    for instruction in session.handle(incoming.Tick(), DEADLINE):
        slots.perform(instruction)
    assert session.is_settled and slots.state in ("free", "committed")


def next_event(data: atheris.FuzzedDataProvider) -> incoming.Event | None:
    """Take one frame from the bytes: free bytes, or a message of our own with fields from them."""
    kind = data.ConsumeIntInRange(0, 4)
    if kind == 0:
        return arrival(data.ConsumeBytes(64), data)
    if kind == 1:
        return incoming.PeerAborted("cancelled", "")
    if kind == 2:
        return incoming.PeerVanished("")
    indexes = tuple(data.ConsumeIntInRange(0, NUM_BLOCKS) for _ in range(data.ConsumeIntInRange(1, 3)))
    if kind == 3:
        num_bytes = data.ConsumeIntInRange(0, 4) * SIZE
        done = frames.Done("t", 1, len(indexes), num_bytes, b"", data.ConsumeInt(8) % 2**64)
        return arrival(frames.encode(done), data)
    sizes = tuple(data.ConsumeIntInRange(0, SIZE + 1) for _ in indexes)
    checksums = tuple(incoming.xxhash.xxh3_64_intdigest(BLOCK) ^ data.ConsumeIntInRange(0, 1) for _ in indexes)
    sequence = data.ConsumeIntInRange(0, 3)
    return arrival(frames.encode(frames.Blocks("t", 1, sequence, "raw", 0, SIZE, (), indexes, sizes, checksums)), data)


def arrival(header: bytes, data: atheris.FuzzedDataProvider) -> incoming.Event | None:
    """Read a header as the receiver would, after the bytes may have changed one of its own."""
    damaged = bytearray(header)
    if damaged and data.ConsumeBool():
        damaged[data.ConsumeIntInRange(0, len(damaged) - 1)] = data.ConsumeIntInRange(0, 255)
    payloads = tuple(memoryview(BLOCK) for _ in range(data.ConsumeIntInRange(0, 3)))
    try:
        message = frames.decode(bytes(damaged), len(payloads))
    except FrameError:
        return None
    assert frames.decode(frames.encode(message), len(payloads)) == message
    match message:
        case frames.Blocks():
            return incoming.BlocksArrived(message, payloads)
        case frames.Done():
            return incoming.DoneArrived(message)
        case frames.Abort(_, _, code, text):
            return incoming.PeerAborted(code, text)
    return None


def fuzz(data: bytes) -> None:
    """Use the bytes as one header frame, and as a sequence."""
    with suppress(FrameError):
        frames.decode(data, len(data) % 3)
    run_session(atheris.FuzzedDataProvider(data))


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz)
    atheris.Fuzz()
