"""Where the engine computes: what the setting `device` means on this machine, and how much of a GPU is for blocks."""

import logging
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.errors import InvalidRequest, ModelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where weights, keys and values lie, and whether Triton's kernels compute there."""

    device: torch.device
    uses_triton: bool

    @classmethod
    def of(cls, name: str) -> "Place":
        """Return the place of a device's name; "auto" is a GPU where torch sees one and triton is installed and works.

        Raises:
            InvalidRequest: there is no such device here; the text says what is missing.
        """
        has_triton = find_spec("triton") is not None
        if name == "cpu" or (name == "auto" and not (torch.cuda.is_available() and has_triton)):
            return cls(torch.device("cpu"), uses_triton=False)
        if not has_triton:
            raise InvalidRequest("device", f"{name!r} needs the package triton, which is not installed")
        if name == "interpreter":
            return cls(torch.device("cpu"), uses_triton=True)
        if not torch.cuda.is_available():
            raise InvalidRequest("device", f"{name!r} is not there: torch {torch.__version__} sees no GPU")
        device = torch.device("cuda" if name == "auto" else name)
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise InvalidRequest("device", f"{name!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
        try:
            check_launcher(name)
        except InvalidRequest as error:
            if name != "auto":
                raise
            logger.warning("computing on the CPU: %s", error)
            return cls(torch.device("cpu"), uses_triton=False)
        return cls(torch.device("cuda", index), uses_triton=True)

    @property
    def name(self) -> str:
        """The name under which `of` finds the place again."""
        return "interpreter" if self.uses_triton and self.device.type == "cpu" else str(self.device)

    @property
    def is_gpu(self) -> bool:
        """Whether the host cannot read the memory, and kernels run while the host goes on."""
        return self.device.type == "cuda"

    def current(self) -> AbstractContextManager[object]:
        """Make the device the calling thread's: kernels are launched on that one, wherever their tensors lie."""
        return torch.cuda.device(self.device) if self.is_gpu else nullcontext()

    def settle(self) -> None:
        """Wait until everything that was asked of the device is done."""
        if self.is_gpu:
            torch.cuda.current_stream(self.device).synchronize()


def check_launcher(name: str) -> None:
    """Have triton build what launches kernels on the device `name`: it compiles that once for each user.

    Raises:
        InvalidRequest: it cannot; the text says what it needs.
    """
    try:
        import_module("triton.runtime").driver.active.get_current_target()  # triton has no types
    except (RuntimeError, AssertionError, ImportError, OSError, subprocess.SubprocessError) as error:
        raise InvalidRequest(
            "device",
            f"{name!r}: triton cannot build what launches its kernels, for which it needs a C compiler and Python's "
            f"headers (apt install gcc python3-dev): {error}",
        ) from error


def on_device(config: EngineConfig) -> EngineConfig:
    """Return the config with the device that `auto` stands for here.

    Raises:
        InvalidRequest: there is no such device, or it cannot do what else is asked.
    """
    return replace(config, device=Place.of(config.device).name)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one GPU: all of it, what nobody uses now, what this process holds now, and the most that it held."""

    total: int
    free: int
    held: int
    peak: int

    @classmethod
    def measure(cls, device: torch.device, run: Callable[[], object]) -> "DeviceMemory":
        """Measure while `run` computes what is largest."""
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_allocated(device), peak)

    def for_blocks(self, utilization: float) -> int:
        """Return what is left for KV blocks: of this process's share of the GPU, and of what others have left free.

        What a step needs beside weights and blocks (peak - held) stays free in both.
        """
        return min(int(self.total * utilization) - self.peak, self.free - (self.peak - self.held))


def block_memory(config: EngineConfig, memory: DeviceMemory, reserved: int) -> int:
    """Return the bytes of the pool of KV blocks on a GPU; `reserved` is for what comes after it: graphs, a draft model.

    Raises:
        ModelError: nothing is left; the text has the figures.
    """
    size = memory.for_blocks(config.gpu_memory_utilization) - reserved
    if size <= 0:
        raise ModelError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} leaves no memory for KV blocks: of "
            f"{memory.total / 2**30:.1f} GiB, {memory.free / 2**30:.1f} GiB are free, weights and one step take "
            f"{memory.peak / 2**30:.1f} GiB" + (f", {reserved / 2**30:.1f} GiB are set aside" if reserved else "")
        )
    return size
