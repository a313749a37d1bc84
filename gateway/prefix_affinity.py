"""Which node last served which prompt prefix: a guess at what its prefix tree still holds. Pure."""

from array import array
from collections import OrderedDict

import xxhash

from pdserve.gateway.node_view import NodeKey

_MAX_DIGESTS_PER_NODE = 8192
_TOKEN_BYTES = array("I").itemsize


def block_digests(token_ids: tuple[int, ...], block_size: int, cache_salt: str) -> tuple[bytes, ...]:
    """Return one digest for each full block; each covers the salt and every token up to the block's end."""
    running = xxhash.xxh3_128(cache_salt.encode("utf-8", "surrogatepass") + b"\0")
    written = memoryview(array("I", token_ids)).cast("B")
    block_bytes = block_size * _TOKEN_BYTES
    digests = []
    for end in range(block_bytes, len(written) + 1, block_bytes):
        running.update(written[end - block_bytes : end])
        digests.append(running.digest())
    return tuple(digests)


class PrefixAffinity:
    """Owns, for each node, the digests it served, least recently used first; each node's are bounded."""

    def __init__(self, max_digests_per_node: int = _MAX_DIGESTS_PER_NODE) -> None:
        self._max_digests = max_digests_per_node
        self._served: dict[NodeKey, OrderedDict[bytes, None]] = {}

    def record(self, node: NodeKey, digests: tuple[bytes, ...]) -> None:
        """Remember that `node` computed or received these blocks."""
        served = self._served.setdefault(node, OrderedDict())
        for digest in digests:
            served[digest] = None
            served.move_to_end(digest)
        while len(served) > self._max_digests:
            served.popitem(last=False)

    def num_matched(self, node: NodeKey, digests: tuple[bytes, ...]) -> int:
        """Return how many leading blocks `node` is thought to hold."""
        served = self._served.get(node, OrderedDict())
        for index, digest in enumerate(digests):
            if digest not in served:
                return index
        return len(digests)

    def keep(self, nodes: frozenset[NodeKey]) -> None:
        """Forget every node that is not in `nodes`."""
        for node in self._served.keys() - nodes:
            del self._served[node]
