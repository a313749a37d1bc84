"""Who may call: API keys by their digests, each with limits of its own. No key is kept in clear."""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pdserve.gateway.errors import InvalidKeyFile

KEY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may use, over all gateways of the installation; None is no limit.

    Tokens are those of prompts and answers together; a day ends at midnight UTC.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_concurrent: int | None = None

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return all(getattr(self, field.name) is None for field in fields(self))


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its SHA-256; `name` is what logs and quotas call its owner."""

    name: str
    digest: bytes
    limits: KeyLimits


class KeyRing:
    """All keys that open one door."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the key that was presented, if there is one.

        All are compared: the time taken says nothing about which came close. A plain SHA-256 is enough, as keys are
        long and random; a slow hash would only make each request slow.
        """
        digest = hashlib.sha256(presented).digest()
        found = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return found[0] if found else None


NO_KEYS = KeyRing(())


def keys_of(secrets: Sequence[str], limits: KeyLimits) -> list[ApiKey]:
    """Return keys given in clear, each named by the start of its digest."""
    digests = [hashlib.sha256(secret.encode()).digest() for secret in dict.fromkeys(secrets)]
    return [ApiKey(f"key-{digest.hex()[:8]}", digest, limits) for digest in digests]


def load_keys(path: Path, defaults: KeyLimits) -> list[ApiKey]:
    """Return the keys of a TOML file: tables `[[keys]]` with `name`, `sha256` and any of the limits.

    Raises:
        InvalidKeyFile: it cannot be read, or an entry is wrong; the text names it.
    """
    try:
        content = path.read_bytes()[: _MAX_FILE_BYTES + 1]
    except OSError as error:
        raise InvalidKeyFile(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise InvalidKeyFile(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        entries = tomllib.loads(content.decode()).get("keys")
    except (ValueError, AttributeError) as error:
        raise InvalidKeyFile(f"{path} is not TOML: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries) or not entries:
        raise InvalidKeyFile(f"{path} has no [[keys]] tables")
    keys = [_key(entry, f"{path}: keys[{index}]", defaults) for index, entry in enumerate(entries)]
    if len({key.name for key in keys}) < len(keys) or len({key.digest for key in keys}) < len(keys):
        raise InvalidKeyFile(f"{path}: two keys have the same name or the same sha256")
    return keys


def _key(entry: Mapping[str, Any], where: str, defaults: KeyLimits) -> ApiKey:
    limit_names = [field.name for field in fields(KeyLimits)]
    unknown = set(entry) - {"name", "sha256", *limit_names}
    if unknown:
        known = ", ".join(("name", "sha256", *limit_names))
        raise InvalidKeyFile(f"{where}: {min(unknown)!r} is not a field; known are {known}")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not KEY_NAME.fullmatch(name):
        raise InvalidKeyFile(f"{where}.name must be 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidKeyFile(f"{where}.sha256 must be 64 hexadecimal digits; `pdserve keys api` prints an entry")
    limits = {}
    for limit_name in limit_names:
        limit = entry.get(limit_name, getattr(defaults, limit_name))
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit < 2**40):
            raise InvalidKeyFile(f"{where}.{limit_name} must be a whole number of at least 1")
        limits[limit_name] = limit
    return ApiKey(name, bytes.fromhex(digest), KeyLimits(**limits))
