"""The ways to move blocks that benchmarks/transfer.py compares, and what is moved."""

from dataclasses import dataclass

from pdserve.kvtransfer import KVLayout, generate_keys

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Way:
    """One way to move blocks; `reference` is the way it is compared with."""

    name: str
    transport: str
    reference: str
    is_bare: bool = False
    is_checked: bool = False
    shared_memory: str = "never"
    secret_key: str | None = None
    is_decoding: bool = False
    is_default: bool = False  # ours chooses by itself


@dataclass(frozen=True, slots=True)
class Job:
    """What is moved, by which way: `run` blocks lie together in memory and make one frame."""

    way: Way
    block_bytes: int
    run: int
    num_blocks: int

    @property
    def layout(self) -> KVLayout:
        """A layout of that block size: 1 KiB for each KV head."""
        return KVLayout("benchmark", 1, 16, self.block_bytes // 1024, 8, "float32")

    @property
    def per_transfer(self) -> int:
        """Blocks of a transfer: some 72 MiB."""
        return max(self.run, 72 * MIB // self.block_bytes)


WAYS = (
    Way("bare tcp", "tcp", "bare tcp", is_bare=True),
    Way("checked tcp", "tcp", "bare tcp", is_bare=True, is_checked=True),
    Way("ours tcp", "tcp", "bare tcp"),
    Way("bare ipc", "ipc", "bare ipc", is_bare=True),
    Way("checked ipc", "ipc", "bare ipc", is_bare=True, is_checked=True),
    Way("ours ipc", "ipc", "bare ipc"),
    Way("ours shm", "ipc", "bare ipc", shared_memory="always"),
    Way("ours default", "tcp", "bare ipc", is_default=True),
)


def curve_ways() -> list[Way]:
    """Return the ways that are encrypted."""
    key = generate_keys().secret_key
    return [
        Way("bare tcp CURVE", "tcp", "bare tcp CURVE", is_bare=True, secret_key=key),
        Way("ours tcp CURVE", "tcp", "bare tcp CURVE", secret_key=key),
        Way("ours shm CURVE", "ipc", "bare ipc", shared_memory="always", secret_key=key),  # only headers are encrypted
    ]


DECODING_WAYS = (
    Way("ours tcp, decoding", "tcp", "bare tcp", is_decoding=True),
    Way("ours shm, decoding", "ipc", "bare ipc", shared_memory="always", is_decoding=True),
)


def make_slots(size_bytes: int) -> list[memoryview]:
    """Return 32 MiB of slots, written once."""
    return [memoryview(bytearray(b"\1" * size_bytes)) for _ in range(max(1, 32 * MIB // size_bytes))]
