"""The settings of the HTTP server: where it listens, who may call, what one request may be."""

from dataclasses import dataclass

from pdserve.cli import value_types
from pdserve.cli.setting_spec import CLUSTER, HEALTH, HTTP, Group, setting
from pdserve.gateway.tool_parsers import ReasoningParser, ToolCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """One value for each of them."""

    host: str = setting(
        "127.0.0.1",
        value_types.text(),
        Group.HTTP,
        CLUSTER | HEALTH,
        "address to bind: the HTTP server's on serve and gateway, the node's sockets' on prefill and decode",
    )
    port: int = setting(
        8000, value_types.whole(0, 65_535), Group.HTTP, HTTP, "port of the HTTP server; 0 takes a free one"
    )
    api_keys: tuple[str, ...] = setting(
        (),
        value_types.texts(),
        Group.HTTP,
        HTTP,
        "keys of which a client must show one as its bearer token; none are asked for by default",
        secret=True,
    )
    api_keys_file: str | None = setting(
        None,
        value_types.text(),
        Group.HTTP,
        HTTP,
        "TOML file with the SHA-256 of each API key and its limits; `pdserve keys api` prints an entry",
    )
    admin_api_keys: tuple[str, ...] = setting(
        (),
        value_types.texts(),
        Group.HTTP,
        HTTP,
        "keys that alone open /admin; by default the API keys do",
        secret=True,
    )
    requests_per_minute: int | None = setting(
        None, value_types.whole(1), Group.HTTP, HTTP, "most requests a minute of one API key, over all gateways"
    )
    tokens_per_minute: int | None = setting(
        None, value_types.whole(1), Group.HTTP, HTTP, "most tokens a minute, prompts and answers, of one API key"
    )
    tokens_per_day: int | None = setting(
        None, value_types.whole(1), Group.HTTP, HTTP, "most tokens a day (UTC), prompts and answers, of one API key"
    )
    max_concurrent_requests: int | None = setting(
        None, value_types.whole(1), Group.HTTP, HTTP, "most requests of one API key at one time, over all gateways"
    )
    tls_cert_file: str | None = setting(
        None,
        value_types.text(),
        Group.HTTP,
        HTTP,
        "PEM file with the certificate chain of HTTPS, read again when it changes; needs --tls-key-file",
    )
    tls_key_file: str | None = setting(
        None, value_types.text(), Group.HTTP, HTTP, "PEM file with the private key of --tls-cert-file"
    )
    cors_allow_origins: tuple[str, ...] = setting(
        (),
        value_types.texts(),
        Group.HTTP,
        HTTP,
        "web pages of these origins may call the API from a browser; * is any, and by default none may",
    )
    response_ttl_s: float = setting(
        3600.0, value_types.number(1, 2_592_000), Group.HTTP, HTTP, "how long Redis keeps a response of /v1/responses"
    )
    strict: bool = setting(
        False,
        value_types.switch(),
        Group.HTTP,
        HTTP,
        "refuse fields that nobody knows instead of reporting them in a header",
    )
    tool_call_parser: str = setting(
        "auto",
        value_types.choice(*ToolCallParser),
        Group.HTTP,
        HTTP,
        "how the model writes function calls of its own accord; auto asks its chat template, which may not say",
    )
    reasoning_parser: str = setting(
        "none",
        value_types.choice(*ReasoningParser),
        Group.HTTP,
        HTTP,
        "think shows what the model writes between <think> and </think> as reasoning_content, apart from its answer",
    )
    max_body: int = setting(32 * 2**20, value_types.size(2**10), Group.HTTP, HTTP, "largest request body")
    max_choices: int = setting(128, value_types.whole(1, 4096), Group.HTTP, HTTP, "most prompts times n of a request")
    request_timeout_s: float = setting(
        600.0, value_types.number(0.1, 86_400), Group.HTTP, HTTP, "longest a request may take"
    )
    keep_alive_s: float = setting(
        10.0,
        value_types.number(0.1, 3_600),
        Group.HTTP,
        HTTP,
        "longest silence of a stream before a comment is sent",
    )
    slow_client_timeout_s: float = setting(
        30.0,
        value_types.number(0.1, 3_600),
        Group.HTTP,
        HTTP,
        "longest a client may leave its stream unread",
    )
    read_timeout_s: float = setting(
        60.0,
        value_types.number(0.1, 3_600),
        Group.HTTP,
        HTTP,
        "longest a client may take to send the head of a request, and as long again for its body",
    )
