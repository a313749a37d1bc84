"""The device thread: an engine stepped in a thread of its own, and what asyncio code may say to it.

The bridge is a pair of queues: commands go in and run between two steps, outputs come back to the event loop after
each step. Everything that touches blocks happens in this one thread, in order; that is why freeing can never race
with writing. Commands are as bounded as their callers: each is awaited, or is the last word about a sequence.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from pdserve.engine.block_pool import BlockId
from pdserve.engine.core_share import CoreShare
from pdserve.engine.engine import Engine
from pdserve.engine.errors import EngineStopped, StepInterrupted
from pdserve.engine.follower import Follower
from pdserve.engine.layer_progress import LayerProgress, LayerWatch
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import StepOutput
from pdserve.engine.step_pace import StepPace, is_steady
from pdserve.engine.tier_moves import BlockChange

logger = logging.getLogger(__name__)

T = TypeVar("T")

_INTEGRITY_INTERVAL_S = 5.0
_LONGEST_UNCHECKED_S = 60.0  # then any moment without sequences will do: steady load may leave no quiet one
_JOIN_TIMEOUT_S = 30.0
_LOOK_AT_OTHERS_S = 0.004  # in a pause for their sake; nothing tells when they have stopped
_LOAD_INTERVAL_S = 0.02  # of steady streams: who asks how busy the engine is does so every second
_QUIET_S = 0.5  # without a step; what was computed last has then reached whom it is for


class SequenceStream:
    """The outputs of one sequence, in order; one for each token and each chunk of the prompt."""

    def __init__(self, seq_id: str, on_layers: Callable[[LayerProgress], None] | None = None) -> None:
        self.seq_id = seq_id
        self.on_layers = on_layers  # told in the event loop, while a step of the sequence runs
        self.granted: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        self._outputs: asyncio.Queue[StepOutput | None] = asyncio.Queue()
        self._follower: Follower[StepOutput | None] | None = None

    async def next(self) -> StepOutput:
        """Wait for the next progress of the sequence.

        Raises:
            EngineStopped: the engine has ended.
        """
        return _checked(await self._outputs.get())

    async def follow(self, take: Callable[[StepOutput], bool]) -> None:
        """Give every output to `take` the moment it comes, until it returns True: no task is woken for a token.

        Raises:
            EngineStopped: the engine has ended.
            Exception: whatever `take` raises.
        """
        while not self._outputs.empty():
            if take(_checked(self._outputs.get_nowait())):
                return
        self._follower = Follower(lambda output: take(_checked(output)))
        try:
            await self._follower.wait()
        finally:
            self._follower = None

    def put(self, output: StepOutput | None) -> None:
        """Append an output, or the end of the engine (None)."""
        if self._follower is None:
            self._outputs.put_nowait(output)
        else:
            self._follower.put(output)

    def grant(self, block_indexes: tuple[int, ...]) -> None:
        """Tell the importer which of its blocks are missing here; their slots are reserved."""
        if not self.granted.done():
            self.granted.set_result(block_indexes)

    def close(self) -> None:
        """Nobody listens any more."""
        if self.granted.done() and not self.granted.cancelled():
            self.granted.exception()  # marks it as seen
        self.granted.cancel()


def _checked(output: StepOutput | None) -> StepOutput:
    if output is None:
        raise EngineStopped("the engine has stopped")
    return output


class EngineThread:
    """Owns the thread and the streams; the engine itself is only ever touched inside the thread."""

    def __init__(self, engine: Engine, core_share: CoreShare | None, pace: StepPace) -> None:
        self._engine = engine
        self._core_share = core_share
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[_Command[Any] | None] = queue.SimpleQueue()
        self._streams: dict[str, SequenceStream] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_started_at: float | None = None
        self._on_cache_changes: Callable[[list[BlockChange]], object] | None = None
        self._checked_at = time.monotonic()
        self._stepped_at = float("-inf")  # when the last step with an output ended
        self.facts = engine.facts
        engine.layer_watch = LayerWatch(
            engine.facts.num_layers, engine.facts.block_size, self._is_followed, self._tell_layers
        )
        self.load = engine.load_now()  # replaced after each step, of steady streams now and then
        self._load_at = time.monotonic()
        self.stopped = asyncio.Event()
        self.failure: BaseException | None = None

    @classmethod
    @asynccontextmanager
    async def start(
        cls, engine: Engine, core_share_file: Path | None = None, tpot_target_s: float | None = None
    ) -> AsyncIterator["EngineThread"]:
        """Run `engine` until the block is left; then the thread has ended and every stream with it.

        Engines of other processes with the same file divide the cores with this one while they all compute; with a
        target, streams leave them the time that they do not need for it.

        Raises:
            ModelError: the file cannot be used.
        """
        core_share = None if core_share_file is None else CoreShare.open(core_share_file)
        thread = cls(engine, core_share, StepPace(tpot_target_s))
        thread._thread.start()
        try:
            yield thread
        finally:
            thread._commands.put(None)
            engine.interrupt()
            await asyncio.wait_for(thread.stopped.wait(), _JOIN_TIMEOUT_S)
            thread._thread.join()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` in the thread between two steps and return what it returns, or raise what it raises."""
        if self.stopped.is_set():
            raise EngineStopped("the engine has stopped")
        command = _Command(function, Future())
        self._commands.put(command)
        return await asyncio.wrap_future(command.result)

    @asynccontextmanager
    async def computing(
        self, *specs: SequenceSpec, on_layers: Callable[[LayerProgress], None] | None = None
    ) -> AsyncIterator[tuple[SequenceStream, ...]]:
        """Add the branches of a prompt; whatever they still hold is freed when the block is left.

        `on_layers` is told which layers of the blocks of the first are final while a step still runs.

        Raises:
            InvalidRequest: one of them could never be computed here.
        """
        with self._listening(specs, on_layers) as streams:
            await self.call(lambda engine: engine.add_branches(specs))
            yield streams

    @asynccontextmanager
    async def importing(self, *specs: SequenceSpec) -> AsyncIterator[tuple[SequenceStream, ...]]:
        """Add the branches of a prompt that arrives as blocks; `granted` of the first tells when and which.

        Whatever they still hold is freed when the block is left, after every landing that was asked for before.

        Raises:
            InvalidRequest: one of them could never be computed here.
        """
        with self._listening(specs) as streams:
            await self.call(lambda engine: engine.add_import(*specs))
            yield streams

    def release(self, seq_id: str) -> None:
        """Free what a sequence holds: nobody wants more of it. Its stream stays open. Idempotent."""
        if not self.stopped.is_set():
            self._commands.put(_Command(lambda engine: engine.scheduler.abort(seq_id), Future()))

    def on_cache_changes(self, tell: Callable[[list[BlockChange]], object]) -> None:
        """Let `tell` know, in the event loop, what comes into the cache and leaves it (`EngineConfig` must log it)."""
        self._on_cache_changes = tell

    async def wait_stopped(self) -> None:
        """Wait until the thread has ended, by itself or because it was told to."""
        await self.stopped.wait()

    def block_bytes(self, block_id: BlockId, num_blocks: int = 1) -> memoryview:
        """Return the memory of exported blocks; safe from any thread while the sequence that holds them is open."""
        return self._engine.block_bytes(block_id, num_blocks)

    def block_runs(self, block_ids: Sequence[BlockId]) -> Iterator[tuple[int, memoryview]]:
        """Yield such blocks as (index of the first, memory) of each run that lies together, as it is asked for."""
        return self._engine.block_runs(block_ids)

    @property
    def progress_age_s(self) -> float:
        """Seconds for which the present step has been running; 0 between steps."""
        started_at = self._step_started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    @contextmanager
    def _listening(
        self, specs: Sequence[SequenceSpec], on_layers: Callable[[LayerProgress], None] | None = None
    ) -> Iterator[tuple[SequenceStream, ...]]:
        for spec in specs:
            assert spec.seq_id not in self._streams, f"{spec.seq_id} is running already"
        streams = tuple(SequenceStream(spec.seq_id, None if index else on_layers) for index, spec in enumerate(specs))
        self._streams.update((stream.seq_id, stream) for stream in streams)
        try:
            yield streams
        finally:
            for stream in streams:
                del self._streams[stream.seq_id]
                stream.close()
                self.release(stream.seq_id)

    def _run(self) -> None:
        try:
            self._work()
        except StepInterrupted:
            pass  # told to end in the middle of a step
        except BaseException as error:
            logger.exception("the engine has failed")
            self.failure = error
        finally:
            if self._core_share is not None:
                self._core_share.close()
            self._engine.close()
            self._loop.call_soon_threadsafe(self._end)

    def _work(self) -> None:
        can_step = False
        while self._run_commands(wait=not can_step):
            granted = self._engine.grant_imports()
            if granted:
                self._loop.call_soon_threadsafe(self._deliver_grants, granted)
            if can_step and self._pause_s() > 0:
                continue
            self._step_started_at = time.monotonic()
            self._pace.begin(self._step_started_at)
            self._say_busy(True)
            outputs = self._engine.step()
            self._step_started_at = None
            if changes := self._engine.tiers.take_changes():
                self._loop.call_soon_threadsafe(self._deliver_changes, changes)
            # A step that computed nothing is repeated only after a command: nothing else can make room.
            can_step = bool(outputs) and self._engine.scheduler.has_work
            self._end_step(outputs, can_step)

    def _end_step(self, outputs: list[StepOutput], can_step: bool) -> None:
        """Let others have the load and the outputs, in this order: who has the last output sees the load after it.

        Of steady streams the load is noted now and then, for every moment here is one between two tokens.
        """
        now = time.monotonic()
        if not can_step or now - self._load_at >= _LOAD_INTERVAL_S or not is_steady(self._engine.scheduler):
            self._note_load(now)
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs)
            self._stepped_at = now

    def _note_load(self, now: float) -> None:
        self.load = self._engine.load_now()
        self._load_at = now

    def _run_commands(self, wait: bool) -> bool:
        """Run what is queued, waiting for the first command if asked to, or until a sequence has waited too long.

        Return False at the end.
        """
        timeout_s = None
        if wait:
            self._say_busy(False)
            timeout_s = self._tidy()
        if not wait and (pause_s := self._pause_s()) > 0:
            self._say_busy(False)
            wait, timeout_s = True, min(pause_s, _LOOK_AT_OTHERS_S)
        while wait or not self._commands.empty():
            try:
                command = self._commands.get(timeout=timeout_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run(self._engine)
            wait = False
        return True

    def _pause_s(self) -> float:
        """Return for how long the next step is to wait for the sake of others."""
        now = time.monotonic()
        left_s = self._pace.left_s(now)
        if not left_s or self._core_share is None or not self._core_share.is_wanted_by_others:
            return 0.0
        self._note_load(now)
        return left_s if is_steady(self._engine.scheduler) else 0.0

    def _say_busy(self, is_busy: bool) -> None:
        if self._core_share is not None:
            self._core_share.set_busy(is_busy)

    def _tidy(self) -> float | None:
        """Do what idle moments are for, as far as nobody wants this one; return when to look again."""
        now = time.monotonic()
        is_quiet = now - self._stepped_at >= _QUIET_S and not self._engine.scheduler.num_sequences
        is_quiet &= self._core_share is None or not self._core_share.is_wanted_by_others
        patience_s = _INTEGRITY_INTERVAL_S if is_quiet else _LONGEST_UNCHECKED_S
        if not self._engine.scheduler.num_sequences and now - self._checked_at > patience_s:
            self._engine.check_integrity()
            self._checked_at = now
        while self._commands.empty() and self._engine.commit_ahead(is_quiet=is_quiet):
            pass
        expiry_s = self._engine.seconds_to_expiry()
        if is_quiet:
            return expiry_s
        return _QUIET_S if expiry_s is None else min(_QUIET_S, expiry_s)

    def _is_followed(self, seq_id: str) -> bool:
        stream = self._streams.get(seq_id)
        return stream is not None and stream.on_layers is not None

    def _tell_layers(self, progress: LayerProgress) -> None:
        self._loop.call_soon_threadsafe(self._deliver_layers, progress)

    def _deliver_layers(self, progress: LayerProgress) -> None:
        stream = self._streams.get(progress.seq_id)
        if stream is not None and stream.on_layers is not None:
            stream.on_layers(progress)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.seq_id)
            if stream is not None:
                stream.put(output)

    def _deliver_changes(self, changes: list[BlockChange]) -> None:
        if self._on_cache_changes is not None:
            self._on_cache_changes(changes)

    def _deliver_grants(self, granted: list[tuple[str, tuple[int, ...]]]) -> None:
        for seq_id, block_indexes in granted:
            stream = self._streams.get(seq_id)
            if stream is not None:
                stream.grant(block_indexes)

    def _end(self) -> None:
        self.stopped.set()
        for stream in self._streams.values():
            stream.put(None)
            if not stream.granted.done():
                stream.granted.set_exception(EngineStopped("the engine has stopped"))
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.refuse(EngineStopped("the engine has stopped"))


class _Command(Generic[T]):
    """A function to run in the thread and where its result goes."""

    def __init__(self, function: Callable[[Engine], T], result: "Future[T]") -> None:
        self.function = function
        self.result = result

    def refuse(self, error: EngineStopped) -> None:
        if self.result.set_running_or_notify_cancel():  # else nobody waits for it any more
            self.result.set_exception(error)

    def run(self, engine: Engine) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.function(engine))
        except Exception as error:
            self.result.set_exception(error)
