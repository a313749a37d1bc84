"""What a gateway is told at start; built once by the command line."""

from dataclasses import dataclass, field
from pathlib import Path

from pdserve.control.channel import CurveKeys
from pdserve.gateway.api_keys import NO_KEYS, KeyRing
from pdserve.gateway.dispatch_config import CanaryConfig, DispatchConfig, PoolConfig
from pdserve.gateway.tls import TlsFiles
from pdserve.gateway.tool_parsers import ReasoningParser, ToolCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Limits and names of the HTTP server. A request may name any of `model_names`; the first is shown in
    lists.

    `max_body_bytes` bounds what is read of a body, `max_choices` prompts times n, `slow_client_timeout_s`
    how long a client may leave its stream unread, `read_timeout_s` how long it may take to send the head of a
    request, and as long again its body.
    """

    model_names: tuple[str, ...]
    max_model_len: int | None = None  # tokens, prompt + output; None: what the nodes can hold
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: KeyRing = NO_KEYS
    admin_keys: KeyRing = NO_KEYS  # empty: API keys open /admin too
    tls: TlsFiles | None = None
    refuse_unknown_fields: bool = False
    tool_call_parser: ToolCallParser = ToolCallParser.AUTO
    reasoning_parser: ReasoningParser = ReasoningParser.NONE
    has_priorities: bool = False  # False: the nodes serve in order of arrival, and a request has no priority
    cors_allow_origins: tuple[str, ...] = ()  # "*" is any
    max_body_bytes: int = 32 * 2**20
    max_choices: int = 128
    request_timeout_s: float = 600.0
    keep_alive_s: float = 10.0
    slow_client_timeout_s: float = 30.0
    read_timeout_s: float = 60.0
    drain_s: float = 2.0
    response_ttl_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """One gateway process: the model directory for its tokenizer, Redis to find nodes by, and its two halves."""

    model_dir: Path
    redis_url: str
    http: HttpConfig
    namespace: str = "default"
    keys: CurveKeys | None = field(default=None, repr=False)  # with which nodes are called; None: in the clear
    chat_template: str | None = None  # its source; None: the model's own
    uses_generation_config: bool = True  # the model's generation_config.json gives the sampling defaults
    gateway_id: str | None = None  # None: a random one
    pool: PoolConfig = field(default_factory=PoolConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
