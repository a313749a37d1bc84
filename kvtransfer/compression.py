"""Whether compressing blocks pays on one connection: measured, never assumed. Pure; times come in as arguments."""

from collections import deque

from pdserve.kvtransfer.encoding import Encoding

COMPRESSIONS = ("auto", "none", "zstd")
_MIN_GAIN = 0.1  # of the time; less is not worth the processor's
_ASSUMED_BYTES_PER_S = 400e6  # of the compressor, until it has been measured
_ASSUMED_RATIO = 0.6  # what is hoped for before a first try
_BLOCKS_BETWEEN_TRIES = 256
_MIN_MEASURED_BYTES = 2**20
_MEMORY = 0.9  # of earlier measurements, with each new one


def pays(link_bytes_per_s: float, compress_bytes_per_s: float, ratio: float) -> bool:
    """Whether a byte is over sooner compressed: 1 / compress + ratio / link < (1 - gain) / link."""
    return link_bytes_per_s / compress_bytes_per_s + ratio < 1 - _MIN_GAIN


class LinkMeter:
    """How fast payload has left for a peer and been taken in there: bytes over the time in which some was under way.

    A link that is seldom full is measured too slow rather than too fast: what is under way alone waits for the peer.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, int]] = deque()  # credit, bytes of payload
        self._busy_since = 0.0
        self._num_bytes = 0.0
        self._busy_s = 0.0
        self._num_measured = 0

    @property
    def bytes_per_s(self) -> float | None:
        """The rate, once enough has been measured."""
        if self._num_measured < _MIN_MEASURED_BYTES or self._busy_s <= 0:
            return None
        return self._num_bytes / self._busy_s

    def sent(self, credit_bytes: int, num_bytes: int, now: float) -> None:
        """Take note of a message that was handed to the socket."""
        if not self._under_way:
            self._busy_since = now
        self._under_way.append((credit_bytes, num_bytes))

    def returned(self, credit_bytes: int, now: float) -> None:
        """Take note of credit that came back."""
        num_bytes = 0
        while self._under_way and credit_bytes >= self._under_way[0][0]:
            credit, payload = self._under_way.popleft()
            credit_bytes -= credit
            num_bytes += payload
        if num_bytes == 0:
            return
        self._num_bytes = self._num_bytes * _MEMORY + num_bytes
        self._busy_s = self._busy_s * _MEMORY + max(0.0, now - self._busy_since)
        self._num_measured += num_bytes
        self._busy_since = now


class CompressionPolicy:
    """Chooses the encoding of each message of one connection: `none` and `zstd` always the same, `auto` by the measured
    rate of the link, ratio and speed of the compressor; what does not pay is tried again once in a while."""

    def __init__(self, compression: str, peer_encodings: tuple[str, ...] = ()) -> None:
        self.meter = LinkMeter()
        self._compression = compression if Encoding.ZSTD in peer_encodings else "none"
        self._ratio: float | None = None
        self._bytes_per_s = _ASSUMED_BYTES_PER_S
        self._num_blocks_untried = 0

    @property
    def is_compressing(self) -> bool:
        """Whether blocks are compressed now, as far as is known."""
        link_bytes_per_s = self.meter.bytes_per_s
        if self._compression != "auto" or link_bytes_per_s is None or self._ratio is None:
            return self._compression == "zstd"
        return pays(link_bytes_per_s, self._bytes_per_s, self._ratio)

    def choose(self, num_blocks: int) -> Encoding:
        """Return the encoding for a message of so many blocks."""
        if self._compression != "auto":
            return Encoding.ZSTD if self._compression == "zstd" else Encoding.RAW
        link_bytes_per_s = self.meter.bytes_per_s
        if link_bytes_per_s is None:
            return Encoding.RAW
        if self._ratio is not None and pays(link_bytes_per_s, self._bytes_per_s, self._ratio):
            return Encoding.ZSTD
        self._num_blocks_untried += num_blocks
        is_due = self._ratio is None or self._num_blocks_untried > _BLOCKS_BETWEEN_TRIES
        if is_due and pays(link_bytes_per_s, self._bytes_per_s, _ASSUMED_RATIO):
            return Encoding.ZSTD
        return Encoding.RAW

    def compressed(self, num_raw_bytes: int, num_bytes: int, seconds: float) -> None:
        """Take note of what compressing came to."""
        self._num_blocks_untried = 0
        ratio, bytes_per_s = num_bytes / num_raw_bytes, num_raw_bytes / max(seconds, 1e-9)
        is_first = self._ratio is None
        self._ratio = ratio if self._ratio is None else self._ratio * _MEMORY + ratio * (1 - _MEMORY)
        self._bytes_per_s = bytes_per_s if is_first else self._bytes_per_s * _MEMORY + bytes_per_s * (1 - _MEMORY)
