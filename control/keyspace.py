"""The names of everything in Redis: `pdserve:<namespace>:...`; no other module spells a key.

Two installations on one Redis use two namespaces and never meet.
"""

import re
from dataclasses import dataclass

_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The keys of one installation."""

    namespace: str = "default"

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(f"namespace {self.namespace!r}: 1 to 64 letters, digits, dots, dashes or underscores")

    def request(self, request_id: str) -> str:
        """Return the key of a request record (hash)."""
        return f"pdserve:{self.namespace}:request:{request_id}"

    def node(self, node_id: str) -> str:
        """Return the key of a node's lease (string: NodeInfo as JSON)."""
        return f"pdserve:{self.namespace}:node:{node_id}"

    def quota(self, owner: str) -> str:
        """Return the key of what the owner of an API key has used (hash)."""
        return f"pdserve:{self.namespace}:quota:{owner}"

    def open_of(self, owner: str) -> str:
        """Return the key of the open requests of the owner of an API key (sorted set: request id by end of lease)."""
        return f"pdserve:{self.namespace}:quota:{owner}:open"

    def response(self, response_id: str) -> str:
        """Return the key of a stored response (string: StoredResponse as JSON)."""
        return f"pdserve:{self.namespace}:response:{response_id}"

    def owner_of(self, response_id: str) -> str:
        """Return the key that says whether a gateway works on a response (string: run or cancel)."""
        return f"pdserve:{self.namespace}:response:{response_id}:owner"

    def gateway(self, gateway_id: str) -> str:
        """Return the key of a gateway's lease (string)."""
        return f"pdserve:{self.namespace}:gateway:{gateway_id}"

    def cancels_of(self, gateway_id: str) -> str:
        """Return the key of what others want a gateway to end (set: ids of answers)."""
        return f"pdserve:{self.namespace}:gateway:{gateway_id}:cancels"

    @property
    def nodes(self) -> str:
        """Return the key of the index of nodes (sorted set: node id by time of renewal)."""
        return f"pdserve:{self.namespace}:nodes"
