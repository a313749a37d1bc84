"""Errors of the gateway.

PdserveError
└── GatewayError
    ├── AdmissionRefused     refused before any work was done; says when to come back
    ├── GenerationFailed     an admitted request that cannot be finished
    ├── ProtocolViolation    a node's chunks contradict each other or the task
    ├── InvalidKeyFile       the file of API keys is not usable
    ├── InvalidCertificate   the files of HTTPS are not usable
    └── CannotListen         the HTTP address cannot be bound

A request that can never be served is the engine's `InvalidRequest`, which names the field.
"""

from pathlib import Path

from pdserve.engine.errors import PdserveError


class GatewayError(PdserveError):
    """Root of the errors that end a request at the gateway."""


class AdmissionRefused(GatewayError):
    """A request that is not taken now. Codes: no_nodes, server_overloaded, redis_unavailable, draining."""

    def __init__(self, code: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class GenerationFailed(GatewayError):
    """An admitted request that ended without a finish reason.

    Codes: node_lost, timeout, cancelled, and what a node says (`TaskFailed.code`: invalid_request, no_blocks,
    transfer_failed, overloaded, draining, queue_timeout, engine_error). `retryable`: the same request may succeed
    later.
    """

    def __init__(self, code: str, message: str, retryable: bool) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable


class ProtocolViolation(GatewayError):
    """What a node sent cannot be part of the answer to the task; another node may do better."""


class CannotListen(GatewayError):
    """The HTTP address cannot be bound."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; give another --host or --port")
        self.host = host
        self.port = port


class InvalidKeyFile(GatewayError):
    """The file of API keys cannot be used; the text says where it is wrong."""


class InvalidCertificate(GatewayError):
    """The certificate and the private key for HTTPS cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the certificate {path} and its key cannot be used: {reason}")
