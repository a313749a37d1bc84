"""What both kinds of node are told about their place among the others."""

from dataclasses import dataclass, field

from pdserve.kvtransfer.curve_keys import CurveKeys
from pdserve.kvtransfer.kv_events import KVEventConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Addresses, leases and limits of one node process. Durations in seconds."""

    node_id: str
    redis_url: str
    namespace: str = "default"
    host: str = "127.0.0.1"  # where sockets bind
    advertise_host: str | None = None  # what others are told to dial; None: the host itself
    keys: CurveKeys | None = field(default=None, repr=False)  # of both planes; None: they are in the clear
    model_name: str = "model"
    registry_lease_s: float = 10.0
    gateway_lease_s: float = 10.0  # a gateway that is silent for so long is gone, and its tasks with it
    drain_s: float = 2.0  # how long running tasks may go on after SIGTERM
    max_tasks: int = 1024
    kv_events: KVEventConfig | None = None  # None: they are not published
    transfer_spans_file: str | None = None  # None: spans are not written

    @property
    def bind_endpoint(self) -> str:
        """Where to bind: a free port of the host."""
        return f"tcp://{_bracketed(self.host)}:0"

    def advertised(self, bound_endpoint: str) -> str:
        """Return the address to register for a socket that is bound to `bound_endpoint`."""
        port = bound_endpoint.rsplit(":", 1)[1]
        return f"tcp://{_bracketed(self.advertise_host or self.host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
