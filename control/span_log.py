"""The spans of a node's transfers as lines of JSON in a file: one for each transfer at its end, with its request id."""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from io import FileIO

from pdserve.kvtransfer.spans import SpanHook, TransferSpan

logger = logging.getLogger(__name__)

_MAX_WAITING = 4_096
_MAX_LABELS = 4_096
_CLOSE_TIMEOUT_S = 1.0


class SpanLog:
    """Owns the file and the queue in front of it: a slow disk costs spans, which are counted, and no time. Without a
    path it does nothing."""

    def __init__(self, node_id: str, path: str | None, clock: Callable[[], float] = time.time) -> None:
        self.num_dropped = 0
        self._node_id = node_id
        self._path = path
        self._clock = clock
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
        self._labels: OrderedDict[str, str] = OrderedDict()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, node_id: str, path: str | None, clock: Callable[[], float] = time.time
    ) -> AsyncIterator["SpanLog"]:
        """Write until the block is left.

        Raises:
            OSError: the file cannot be written.
        """
        log = cls(node_id, path, clock)
        if path is None:
            yield log
            return
        with FileIO(path, "a") as file:  # one write a batch of lines: several nodes may share the file
            writing = asyncio.create_task(log._write_all(file), name="write spans")
            try:
                yield log
            finally:
                await log._close(writing)

    @property
    def hook(self) -> SpanHook | None:
        """What the ends of the KV plane are given; None where nothing is written."""
        return None if self._path is None else self.tell

    def label(self, transfer_id: str, request_id: str) -> None:
        """Remember whose transfer it is, for the end that is not told; the oldest are forgotten."""
        self._labels[transfer_id] = request_id
        if len(self._labels) > _MAX_LABELS:
            self._labels.popitem(last=False)

    def tell(self, span: TransferSpan) -> None:
        """Queue one span."""
        fields = asdict(span)
        label = fields.pop("label") or self._labels.pop(span.transfer_id, None)
        line = {"ended_at_unix_s": self._clock(), "node_id": self._node_id, "request_id": label, **fields}
        try:
            self._waiting.put_nowait(json.dumps(line).encode() + b"\n")
        except asyncio.QueueFull:
            self.num_dropped += 1

    async def _write_all(self, file: FileIO) -> None:
        while True:
            lines = [await self._waiting.get()]
            while not self._waiting.empty():
                lines.append(self._waiting.get_nowait())
            try:
                await asyncio.to_thread(file.write, b"".join(lines))
            except OSError as error:
                self.num_dropped += len(lines)
                logger.warning("%d spans of transfers could not be written: %s", len(lines), error)
            finally:
                for _ in lines:
                    self._waiting.task_done()

    async def _close(self, writing: asyncio.Task[None]) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._waiting.join()
        except TimeoutError:
            logger.warning("%d spans of transfers were not written in time", self._waiting.qsize())
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
