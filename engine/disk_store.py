"""The disk tier: a directory of block files and the thread that reads and writes them.

The thread takes jobs in order, so a read sees what was written before it. The prefix tree bounds how many jobs are
under way. No error of the file system leaves the thread: a block that cannot be written or read is not there.
"""

import fcntl
import logging
import os
import queue
import threading
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from pdserve.engine.disk_format import (
    MAGIC,
    SUFFIX,
    BlockFile,
    decode_block,
    decode_header,
    encode_header,
    max_header_bytes,
)
from pdserve.engine.errors import CorruptBlock, ModelError
from pdserve.engine.tier_moves import DiskBlock

logger = logging.getLogger(__name__)

_MAX_DIRECTORIES = 256
_JOIN_TIMEOUT_S = 10.0
_TEMPORARY = "block.tmp"


@dataclass(frozen=True, slots=True)
class DiskResult:
    """The end of a read or a write; `payload` of a read that was sound."""

    key: bytes
    is_read: bool
    is_done: bool
    payload: memoryview | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    key: bytes
    block: DiskBlock | None = None  # of a write
    payload: bytes | None = None
    is_read: bool = False


class DiskStore:
    """Owns one directory `kv-N` below the one given, by a lock that ends with the process, and the thread."""

    def __init__(self, directory: Path, lock: TextIOWrapper, identity: bytes, block_bytes: int) -> None:
        self._directory = directory
        self._lock = lock
        self._identity = identity
        self._block_bytes = block_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[DiskResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv disk", daemon=True)
        self._has_complained = False

    @classmethod
    def open(cls, parent: Path, identity: bytes, block_bytes: int) -> "DiskStore":
        """Claim the first directory below `parent` that no process has, and start the thread.

        Raises:
            ModelError: the directory cannot be used.
        """
        try:
            for number in range(_MAX_DIRECTORIES):
                directory = parent / f"kv-{number}"
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = (directory / "lock").open("w")
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.close()
                    continue
                store = cls(directory, lock, identity, block_bytes)
                store._thread.start()
                return store
        except OSError as error:
            raise ModelError(f"kv_disk_dir={parent} cannot be used: {error}") from error
        raise ModelError(f"kv_disk_dir={parent}: all of its {_MAX_DIRECTORIES} directories are in use")

    def blocks(self) -> list[DiskBlock]:
        """Return the blocks of this model that lie here, oldest first, and delete those of other models.

        Damaged ones go as well. What does not begin like a block file is left alone.
        """
        found: list[tuple[int, DiskBlock]] = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            try:
                file = _read_header(path)
                if file.identity == self._identity and path == self._path(file.block.key):
                    found.append((path.stat().st_mtime_ns, file.block))
                else:
                    path.unlink()
            except CorruptBlock as error:
                logger.warning("%s is not used: %s", path, error)
                _delete_if_ours(path)
            except OSError as error:
                logger.warning("%s cannot be read: %s", path, error)
        found.sort(key=lambda entry: entry[0])
        return [block for _, block in found]

    def write(self, block: DiskBlock, payload: memoryview) -> None:
        """Queue a write of a copy of `payload`."""
        self._jobs.put(_Job(block.key, block, bytes(payload)))

    def read(self, key: bytes) -> None:
        """Queue a read, which takes the block off the disk."""
        self._jobs.put(_Job(key, is_read=True))

    def drop(self, key: bytes) -> None:
        """Queue a deletion; it has no result."""
        self._jobs.put(_Job(key))

    def results(self, timeout_s: float) -> list[DiskResult]:
        """Return what has ended, after waiting up to `timeout_s` for the first."""
        ended: list[DiskResult] = []
        try:
            ended.append(self._results.get(timeout=timeout_s) if timeout_s > 0 else self._results.get_nowait())
            while True:
                ended.append(self._results.get_nowait())
        except queue.Empty:
            return ended

    def close(self) -> None:
        """Finish the queued jobs, end the thread and give the directory up."""
        self._jobs.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)
        self._lock.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._perform(job)
            except OSError as error:
                if not self._has_complained:
                    self._has_complained = True
                    logger.warning("the disk tier in %s fails (said once): %s", self._directory, error)
                if job.is_read or job.block is not None:
                    self._results.put(DiskResult(job.key, job.is_read, is_done=False))

    def _perform(self, job: _Job) -> None:
        path = self._path(job.key)
        if job.block is not None and job.payload is not None:
            temporary = self._directory / _TEMPORARY
            with open(temporary, "wb", opener=_private) as file:
                file.write(encode_header(self._identity, job.block, job.payload))
                file.write(job.payload)
            temporary.replace(path)
            self._results.put(DiskResult(job.key, is_read=False, is_done=True))
        elif job.is_read:
            self._results.put(self._take(job.key, path))
        else:
            path.unlink(missing_ok=True)

    def _take(self, key: bytes, path: Path) -> DiskResult:
        try:
            payload = decode_block(_read(path, self._block_bytes), self._identity, key, self._block_bytes)
        except (CorruptBlock, OSError) as error:
            logger.warning("block file %s is not used: %s", path.name, error)
            path.unlink(missing_ok=True)
            return DiskResult(key, is_read=True, is_done=False)
        path.unlink(missing_ok=True)
        return DiskResult(key, is_read=True, is_done=True, payload=payload)

    def _path(self, key: bytes) -> Path:
        return self._directory / f"{key.hex()}{SUFFIX}"


def _read_header(path: Path) -> BlockFile:
    with path.open("rb") as file:
        return decode_header(file.read(max_header_bytes()))


def _read(path: Path, block_bytes: int) -> bytes:
    most = max_header_bytes() + block_bytes
    with path.open("rb") as file:
        return file.read(most + 1)  # a longer file is longer than its header says, too


def _delete_if_ours(path: Path) -> None:
    with path.open("rb") as file:
        is_ours = file.read(len(MAGIC)) == MAGIC
    if is_ours:
        path.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
