"""Which ways through the nodes have lately been shown to work: facts of finished requests and failed canaries. Pure."""

import math
from collections.abc import Sequence

from pdserve.gateway.node_view import NodeKey, NodeView

Path = tuple[NodeKey, ...]  # the decode node, then the prefill node where it is another one


def wanted_paths(views: Sequence[NodeView]) -> tuple[Path, ...]:
    """Return the paths that requests should take: each pair of one model; a decode node alone only without a pair.

    In an order that has every node early: the first pairs go through different ones.
    """
    ready = [view for view in views if view.is_ready]
    decodes = [view for view in ready if view.is_decode]
    paths: list[tuple[int, Path]] = []
    for row, decode in enumerate(decodes):
        digest = decode.info.model_digest
        prefills = [view for view in ready if not view.is_decode and view.info.model_digest == digest]
        for column, prefill in enumerate(prefills):
            paths.append(((column - row) % len(prefills), (decode.key, prefill.key)))
        if not prefills:
            paths.append((0, (decode.key,)))
    return tuple(path for _, path in sorted(paths, key=lambda item: item[0]))


class PathProofs:
    """When each path last finished a request, and when a canary last failed on it; the later one counts."""

    def __init__(self) -> None:
        self._proven_at: dict[Path, float] = {}
        self._failed_at: dict[Path, float] = {}

    def note_proof(self, path: Path, now: float) -> None:
        """A request was finished by these nodes."""
        self._proven_at[path] = now
        if self._failed_at:  # seldom, and this is asked for every token
            self._failed_at.pop(path, None)

    def note_failure(self, path: Path, now: float) -> None:
        """A canary could not pass."""
        self._failed_at[path] = now
        self._proven_at.pop(path, None)

    def forget_all_but(self, nodes: frozenset[NodeKey]) -> None:
        """Keep nothing of nodes that are gone."""
        self._proven_at = {path: at for path, at in self._proven_at.items() if nodes.issuperset(path)}
        self._failed_at = {path: at for path, at in self._failed_at.items() if nodes.issuperset(path)}

    def is_proven_since(self, path: Path, since: float) -> bool:
        """Whether `path` has worked at or after `since`."""
        return self._proven_at.get(path, -math.inf) >= since

    def covers(self, nodes: frozenset[NodeKey]) -> bool:
        """Whether each of `nodes` is part of a proven path."""
        return nodes <= {key for path in self._proven_at for key in path}

    def holds(self, wanted: Sequence[Path], alive: frozenset[NodeKey]) -> bool:
        """Whether a token can be expected to pass now.

        One proven path of those wanted is enough. While none of them has been tried yet, as when the first prefill
        node has just come, an older proof through living nodes still counts.
        """
        if any(path in self._proven_at for path in wanted):
            return True
        if not wanted or any(path in self._failed_at for path in wanted):
            return False
        return any(alive.issuperset(path) for path in self._proven_at)

    def next_due(self, wanted: Sequence[Path], now: float, interval_s: float, retry_s: float) -> Path | None:
        """Return the path that should be tried now: an untried one, a failed one, or the oldest when all are old."""
        for path in wanted:
            if path not in self._proven_at and path not in self._failed_at:
                return path
        failed = [path for path in wanted if now - self._failed_at.get(path, now) >= retry_s]
        if failed:
            return min(failed, key=self._failed_at.__getitem__)
        proven = [path for path in wanted if path in self._proven_at]
        if proven and all(now - self._proven_at[path] >= interval_s for path in proven):
            return min(proven, key=self._proven_at.__getitem__)
        return None

    def has_failure(self, wanted: Sequence[Path]) -> bool:
        """Whether one of `wanted` has failed since it was last proven."""
        return any(path in self._failed_at for path in wanted)
