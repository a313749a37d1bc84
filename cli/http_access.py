"""The HTTP server from the settings: where it listens, and who may reach it (API keys, admin keys, HTTPS)."""

import hashlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.errors import SettingError
from pdserve.cli.settings import Settings
from pdserve.engine.scheduler_config import SchedulingPolicy

if TYPE_CHECKING:
    from pdserve.gateway.api_keys import KeyRing
    from pdserve.gateway.config import HttpConfig
    from pdserve.gateway.tls import TlsFiles


def api_keys(settings: Settings) -> "KeyRing":
    """Return the keys of --api-keys and --api-keys-file.

    Raises:
        SettingError: limits without keys, the same key twice, or a file that cannot be used.
    """
    from pdserve.gateway.api_keys import KeyLimits, KeyRing, keys_of, load_keys
    from pdserve.gateway.errors import InvalidKeyFile

    limits = KeyLimits(
        requests_per_minute=settings.requests_per_minute,
        tokens_per_minute=settings.tokens_per_minute,
        tokens_per_day=settings.tokens_per_day,
        max_concurrent=settings.max_concurrent_requests,
    )
    keys = keys_of(settings.api_keys, limits)
    if settings.api_keys_file is not None:
        try:
            keys += load_keys(Path(settings.api_keys_file).expanduser(), limits)
        except InvalidKeyFile as error:
            raise SettingError(f"--api-keys-file: {error}") from None
    if not keys and not limits.is_none:
        raise SettingError("limits are those of API keys: give --api-keys or --api-keys-file too")
    if len({key.digest for key in keys}) < len(keys):
        raise SettingError("one key is both in --api-keys and in --api-keys-file")
    return KeyRing(keys)


def admin_keys(settings: Settings) -> "KeyRing":
    """Return the keys of --admin-api-keys."""
    from pdserve.gateway.api_keys import KeyLimits, KeyRing, keys_of

    return KeyRing(keys_of(settings.admin_api_keys, KeyLimits()))


def tls_files(settings: Settings) -> "TlsFiles | None":
    """Return the files of HTTPS, or None if it is off.

    Raises:
        SettingError: one of the two is missing.
        InvalidCertificate: they cannot be used.
    """
    from pdserve.gateway.tls import TlsCertificate, TlsFiles

    if settings.tls_cert_file is None and settings.tls_key_file is None:
        return None
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        raise SettingError("HTTPS needs both --tls-cert-file and --tls-key-file")
    files = TlsFiles(Path(settings.tls_cert_file).expanduser(), Path(settings.tls_key_file).expanduser())
    TlsCertificate(files)  # what is wrong with them is said before anything slow
    return files


def http_config(settings: Settings, model_name: str) -> "HttpConfig":
    """Return the configuration of a gateway's HTTP server.

    Raises:
        PdserveError: keys, limits or certificate cannot be used.
    """
    from pdserve.gateway.config import HttpConfig
    from pdserve.gateway.tool_parsers import ReasoningParser, ToolCallParser

    return HttpConfig(
        model_names=(model_name,),
        max_model_len=settings.max_model_len,
        host=settings.host,
        port=settings.port,
        api_keys=api_keys(settings),
        admin_keys=admin_keys(settings),
        tls=tls_files(settings),
        refuse_unknown_fields=settings.strict,
        tool_call_parser=ToolCallParser(settings.tool_call_parser),
        reasoning_parser=ReasoningParser(settings.reasoning_parser),
        has_priorities=settings.scheduling_policy == SchedulingPolicy.PRIORITY,
        cors_allow_origins=settings.cors_allow_origins,
        max_body_bytes=settings.max_body,
        max_choices=settings.max_choices,
        request_timeout_s=settings.request_timeout_s,
        keep_alive_s=settings.keep_alive_s,
        slow_client_timeout_s=settings.slow_client_timeout_s,
        read_timeout_s=settings.read_timeout_s,
        drain_s=settings.drain_s,
        response_ttl_s=settings.response_ttl_s,
    )


def read_chat_template(path: str | None) -> str | None:
    """Return the text of --chat-template.

    Raises:
        SettingError: it cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingError(f"--chat-template: cannot read {path!r} ({reason}); give a Jinja file") from None


def check_access(settings: Settings) -> None:
    """Say now what a gateway would say later.

    Raises:
        PdserveError: keys, limits or certificate cannot be used.
    """
    api_keys(settings)
    tls_files(settings)


def new_api_key(name: str) -> tuple[str, str]:
    """Return a new key, and the entry of --api-keys-file that lets it in.

    Raises:
        SettingError: the name is not fit for the file.
    """
    from pdserve.gateway.api_keys import KEY_NAME

    if not KEY_NAME.fullmatch(name):
        raise SettingError(f"{name!r} is no name for a key: 1 to 64 letters, digits, dots, dashes or underscores")
    secret = f"pds-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return secret, f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"'
