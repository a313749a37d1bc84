"""pdserve: disaggregated prefill and decode for large language models."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pdserve.engine.beam_search import BeamSearchParams
    from pdserve.engine.llm import LLM
    from pdserve.engine.prompt_run import RequestOutput
    from pdserve.engine.sampling_params import SamplingParams
    from pdserve.engine.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load the public classes on first use, so that `import pdserve` stays free of torch."""
    if name in ("LLM", "RequestOutput"):
        from pdserve.engine import llm

        return getattr(llm, name)
    if name == "BeamSearchParams":
        from pdserve.engine.beam_search import BeamSearchParams

        return BeamSearchParams
    if name == "SamplingParams":
        from pdserve.engine.sampling_params import SamplingParams

        return SamplingParams
    if name in ("GuidedDecodingParams", "StructuredOutputsParams"):
        from pdserve.engine import structured_outputs

        return getattr(structured_outputs, name)
    raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
