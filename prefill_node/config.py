"""Configuration of a prefill node."""

from dataclasses import dataclass

from pdserve.control.node_config import NodeConfig
from pdserve.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNodeConfig:
    """A node that computes prompts and ships their blocks."""

    node: NodeConfig
    engine: EngineConfig
    transfer_lease_s: float = 10.0
    wire_dtype: str = "auto"
    wire_compression: str = "auto"
    uses_shortcuts: bool = True  # to decode nodes of this machine: Unix sockets and shared memory
    transfer_timeout_s: float = 120.0  # from the offer to the acknowledgement, the computation included
