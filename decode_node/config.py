"""Configuration of a decode node."""

from dataclasses import dataclass

from pdserve.control.node_config import NodeConfig
from pdserve.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNodeConfig:
    """A node that lands blocks and generates."""

    node: NodeConfig
    engine: EngineConfig
    transfer_lease_s: float = 10.0
    transfer_credit_bytes: int = 64 * 1024 * 1024  # payload under way from one prefill node
    offer_timeout_s: float = 10.0  # how long a task and its offer may wait for each other
    room_timeout_s: float = 30.0  # how long an offer may wait for free blocks
