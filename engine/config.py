"""How an engine is set up: model, precision, memory and the limits of a step. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.engine.errors import InvalidRequest
from pdserve.engine.scheduler_config import SchedulerConfig, SchedulingPolicy
from pdserve.engine.speculative_config import SpeculativeConfig
from pdserve.engine.swap_rule import PreemptionMode

DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_DTYPES = (*DTYPES, "int8", "auto")
KV_CACHE_DTYPES = ("auto", *DTYPES, "int8", "fp8")
MODEL_IMPLS = ("auto", "own", "transformers")
_DEVICES = re.compile(r"auto|cpu|interpreter|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine. `num_blocks` wins over `kv_memory_bytes`; None for a limit means "what the model allows".

    `kv_memory_bytes` None: 2 GiB on a CPU; on a GPU what `gpu_memory_utilization` of its memory leaves beside weights
    and the largest step. The device "interpreter" is for tests: Triton's kernels, interpreted on tensors of the CPU.

    `speculative_config` may be given as a mapping (see `SpeculativeConfig.from_mapping`); None is no speculation.
    Blocks that leave `kv_memory_bytes` live on in `kv_host_memory_bytes`, and then in `kv_disk_dir`.
    """

    model_dir: Path
    dtype: str = "float32"  # of the weights
    kv_cache_dtype: str = "auto"  # that of the computation; beside int8 weights bfloat16
    device: str = "auto"  # cpu, cuda, cuda:N; auto: a GPU where torch sees one and triton is installed
    model_impl: str = "auto"  # pdserve's own decoder where there is one for the model type, else transformers' code
    block_size: int = 16
    kv_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    kv_host_memory_bytes: int = 0
    kv_disk_dir: Path | None = None
    kv_disk_bytes: int = 10 * 1024**3
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    logs_cache_changes: bool = False  # for KV events
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    num_threads: int | None = None
    core_share_file: Path | None = None  # through which the engines of a machine share its cores
    enable_prefix_cache: bool = True
    scheduling_policy: str = SchedulingPolicy.FCFS.value
    short_prompt_share: float = 0.5
    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    growth_reserve: float = 0.5
    max_waiting_s: float | None = None
    batch_invariant: bool = False  # on a GPU: fixed splits and tiles, the same bits in any batch
    enforce_eager: bool = False  # on a GPU: no CUDA graphs of the decode step
    use_cpu_kernels: bool = True  # False: the torch reference, also where the compiled kernels are built
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            speculative_config = SpeculativeConfig.from_mapping(self.speculative_config)
            object.__setattr__(self, "speculative_config", speculative_config)
        if self.dtype not in WEIGHT_DTYPES:
            raise InvalidRequest("dtype", f"must be one of {', '.join(WEIGHT_DTYPES)}, got {self.dtype!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            choices = ", ".join(KV_CACHE_DTYPES)
            raise InvalidRequest("kv_cache_dtype", f"must be one of {choices}, got {self.kv_cache_dtype!r}")
        self._check_device()
        if self.model_impl not in MODEL_IMPLS:
            raise InvalidRequest("model_impl", f"must be one of {', '.join(MODEL_IMPLS)}, got {self.model_impl!r}")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"must be at least 1, got {getattr(self, name)}")
        if self.kv_host_memory_bytes < 0 or self.kv_disk_bytes < 0:
            raise InvalidRequest("kv_host_memory_bytes, kv_disk_bytes", "must not be negative")
        if self.kv_disk_dir is not None and (not self.kv_host_memory_bytes or not self.enable_prefix_cache):
            raise InvalidRequest(
                "kv_disk_dir", "needs kv_host_memory_bytes, through which blocks go, and the prefix cache"
            )
        for name in ("num_blocks", "kv_memory_bytes", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(name, f"must be at least 1, got {value}")
        self._check_scheduling()

    @property
    def compute_dtype(self) -> str:
        """What activations are: int8 weights, which auto may choose, compute in float32, on a GPU in bfloat16."""
        if self.dtype not in ("int8", "auto"):
            return self.dtype
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    @property
    def resolved_kv_dtype(self) -> str:
        """What keys and values are held in: half the bytes cost int8 weights, which are rougher, no accuracy."""
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        is_cpu = self.device in ("cpu", "auto")  # auto that is no GPU; a GPU computes in bfloat16 as it is
        return "bfloat16" if self.dtype == "int8" and is_cpu else self.compute_dtype

    @property
    def tpot_target_s(self) -> float | None:
        """In what time running streams are to get a token."""
        return None if self.tpot_target_ms is None else self.tpot_target_ms / 1000

    def scheduling(self, max_model_len: int) -> SchedulerConfig:
        """Return what the scheduler is told, for a model that takes `max_model_len` tokens."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_cache=self.enable_prefix_cache,
            policy=SchedulingPolicy(self.scheduling_policy),
            short_prompt_share=self.short_prompt_share,
            tpot_target_s=self.tpot_target_s,
            ttft_target_s=None if self.ttft_target_ms is None else self.ttft_target_ms / 1000,
            growth_reserve=self.growth_reserve,
            max_waiting_s=self.max_waiting_s,
        )

    def _check_device(self) -> None:
        if _DEVICES.fullmatch(self.device) is None:
            raise InvalidRequest("device", f"must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidRequest(
                "gpu_memory_utilization", f"must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            raise InvalidRequest(
                "kv_cache_dtype", "fp8 needs a GPU; on a CPU, int8 holds keys and values in as many bytes"
            )

    def _check_scheduling(self) -> None:
        policies = list(SchedulingPolicy)
        if self.scheduling_policy not in policies:
            raise InvalidRequest(
                "scheduling_policy", f"must be one of {', '.join(policies)}, got {self.scheduling_policy!r}"
            )
        for name in ("short_prompt_share", "growth_reserve"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidRequest(name, f"must be between 0 and 1, got {getattr(self, name)}")
        for name in ("tpot_target_ms", "ttft_target_ms", "max_waiting_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(name, f"must be more than 0, got {value}")
