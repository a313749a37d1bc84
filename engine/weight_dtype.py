"""What `--dtype auto` means: the fastest dtype of the weights that keeps perplexity within 1 % of float32."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.engine.config import EngineConfig
from pdserve.engine.model_runner import has_own_decoder
from pdserve.kernels.cpu import CpuKernels

# Families whose int8 perplexity was measured (docs/performance_kernels.md); others stay in float32.
_INT8_MEASURED = frozenset({"llama", "gemma3", "gemma3_text"})


def with_weight_dtype(config: EngineConfig, model_config: Mapping[str, Any]) -> EngineConfig:
    """Return the config with the dtype that `auto` stands for: int8 where it is fast and known to be good."""
    if config.dtype != "auto":
        return config
    if config.device.startswith("cuda"):  # what their matrix products are made for
        return replace(config, dtype="bfloat16")
    is_good = model_config.get("model_type") in _INT8_MEASURED and has_own_decoder(config.model_impl, model_config)
    is_fast = config.use_cpu_kernels and CpuKernels.load(1) is not None
    return replace(config, dtype="int8" if is_good and is_fast else "float32")
