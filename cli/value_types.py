"""How the text of a flag, a variable or a TOML entry becomes a value, and what to say when it cannot.

Every type has `expects` (what follows "must be") and `parse`, which raises ValueError on anything else.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdserve.engine.speculative_config import SpeculativeConfig

SettingValue = str | int | float | bool | tuple[str, ...] | None

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True, slots=True)
class ValueType:
    """A set of values with a name for help texts."""

    metavar: str
    expects: str
    parse: Callable[[object], SettingValue]
    is_switch: bool = False


def text(max_bytes: int | None = None) -> ValueType:
    """Any non-empty text, or one of at most so many bytes in UTF-8."""

    def parse(raw: object) -> SettingValue:
        if not isinstance(raw, str) or not raw or (max_bytes is not None and len(raw.encode()) > max_bytes):
            raise ValueError
        return raw

    return ValueType("TEXT", "a non-empty text" + (f" of at most {max_bytes} bytes" if max_bytes else ""), parse)


def redis_url() -> ValueType:
    """A URL of one of the forms that `control.redis_connection` knows."""

    def parse(raw: object) -> SettingValue:
        if not isinstance(raw, str) or raw.partition("://")[0] not in _REDIS_SCHEMES or raw.endswith("://"):
            raise ValueError
        _check_redis_address(raw)
        return raw

    return ValueType(
        "URL", f"a URL that begins with one of {', '.join(f'{name}://' for name in _REDIS_SCHEMES)}", parse
    )


def _check_redis_address(url: str) -> None:
    """Raise ValueError for a port that is no number, or a Sentinel URL without hosts or service."""
    scheme, _, rest = url.partition("://")
    if not scheme.endswith("+sentinel"):
        _ = urlsplit(url).port
        return
    hosts, _, path = rest.partition("?")[0].rpartition("@")[2].partition("/")
    if not hosts or not path.partition("/")[0]:
        raise ValueError
    for host in hosts.split(","):
        _ = urlsplit(f"redis://{host}").port


def speculative_config() -> ValueType:
    """A JSON object, or a TOML table, that `engine.speculative_config` understands; kept as JSON."""

    def parse(raw: object) -> SettingValue:
        text = json.dumps(raw) if isinstance(raw, dict) else raw
        if not isinstance(text, str):
            raise ValueError
        SpeculativeConfig.from_json(text)
        return text

    return ValueType("JSON", "a JSON object with num_speculative_tokens, and method or model", parse)


def matching(pattern: str, expects: str) -> ValueType:
    """A text that is matched by `pattern` as a whole."""

    def parse(raw: object) -> SettingValue:
        if not isinstance(raw, str) or not re.fullmatch(pattern, raw):
            raise ValueError
        return raw

    return ValueType("TEXT", expects, parse)


def texts() -> ValueType:
    """Several texts: comma-separated, or a TOML array."""

    def parse(raw: object) -> SettingValue:
        items = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ValueError
        return tuple(item.strip() for item in items if item.strip())

    return ValueType("A,B", "texts separated by commas", parse)


def whole(minimum: int, maximum: int | None = None) -> ValueType:
    """A whole number in [minimum, maximum]."""

    def parse(raw: object) -> SettingValue:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError
        value = int(raw)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError
        return value

    limit = f"between {minimum} and {maximum}" if maximum is not None else f"of at least {minimum}"
    return ValueType("N", f"a whole number {limit}", parse)


def number(minimum: float, maximum: float) -> ValueType:
    """A finite number in [minimum, maximum]."""

    def parse(raw: object) -> SettingValue:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError
        value = float(raw)
        if not math.isfinite(value) or not minimum <= value <= maximum:
            raise ValueError
        return value

    return ValueType("X", f"a number between {minimum:g} and {maximum:g}", parse)


def size(minimum: int) -> ValueType:
    """A number of bytes, as 2GiB, 512M or 1073741824; units are powers of 1,024."""

    def parse(raw: object) -> SettingValue:
        match = _SIZE.fullmatch(str(raw).strip()) if isinstance(raw, int | str) else None
        if isinstance(raw, bool) or match is None:
            raise ValueError
        value = int(float(match[1]) * _UNIT_BYTES[(match[2] or "").lower().removesuffix("i")])
        if value < minimum:
            raise ValueError
        return value

    return ValueType("SIZE", f"a size such as 2GiB or 512MiB, at least {minimum // 2**10} KiB", parse)


def choice(*names: str, note: str = "") -> ValueType:
    """One of `names`; the note says why it is not what somebody might expect."""

    def parse(raw: object) -> SettingValue:
        if raw not in names:
            raise ValueError
        return str(raw)

    return ValueType("|".join(names), f"one of {', '.join(names)}{note}", parse)


def switch() -> ValueType:
    """True or false."""

    def parse(raw: object) -> SettingValue:
        word = str(raw).lower()
        if word not in _TRUE | _FALSE:
            raise ValueError
        return word in _TRUE

    return ValueType("", "true or false", parse, is_switch=True)
