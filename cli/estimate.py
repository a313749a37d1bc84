"""`pdserve estimate`: the memory that a model's KV takes and the requests that fit, from its config alone."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdserve.cli.errors import SettingError
from pdserve.cli.value_types import ValueType, choice, size, whole
from pdserve.engine.kv_shape import KVShape, count_parameters
from pdserve.engine.memory_estimate import VALUE_BYTES, MemoryEstimate
from pdserve.engine.model_config import find_config, stored_parameters

_SUMMARY = "tell how much memory the KV of a model takes and how many requests fit, without loading it"
_EXAMPLES = """\
examples:
  pdserve estimate demo
  pdserve estimate ./Qwen3-8B --context 2048,8192,32768 --concurrency 1,10 --memory 40GiB
  pdserve estimate Qwen/Qwen3-8B --kv-cache-dtype int8 --memory 24GiB --average 700
  pdserve estimate '{"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}' --weights 14GiB"""

_COUNT = whole(1)
OPTIONS: Mapping[str, tuple[ValueType, str]] = {
    "dtype": (choice("float32", "bfloat16", "float16", "int8"), "type of weights; by default the config's own"),
    "kv_cache_dtype": (choice("auto", *VALUE_BYTES), "type of KV; by default that of weights, with int8 bfloat16"),
    "block_size": (whole(1, 1024), "tokens in one KV block (default 16)"),
    "context": (_COUNT, "tokens of a request, comma-separated (default 2048,8192,32768)"),
    "concurrency": (_COUNT, "requests at a time, comma-separated (default 1,10)"),
    "average": (_COUNT, "tokens that a request holds on average; by default a quarter of its context"),
    "memory": (size(2**20), "memory of the device, such as 40GiB; without it nothing is said of what fits"),
    "weights": (size(0), "memory of the weights; by default from the files, or about what the config describes"),
    "buffers": (size(0), "memory for everything else (default 0)"),
}


def add_estimate_options(commands: Any) -> None:
    """Declare the subcommand on argparse's collection of them."""
    parser = commands.add_parser(
        "estimate",
        help=_SUMMARY,
        description=f"{_SUMMARY[0].upper()}{_SUMMARY[1:]}.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model_help = "directory, config.json, hub id, demo, or the fields of a config as JSON"
    parser.add_argument("model", metavar="MODEL_OR_CONFIG", help=model_help)
    for name, (value_type, help_text) in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar=value_type.metavar, help=help_text)


def estimate(flags: Mapping[str, str], *, progress: Callable[[str], None]) -> str:
    """Return the report for the options as typed.

    Raises:
        SettingError: an option has a wrong value.
        ModelError: there is no such model, or its state is not keys and values.
    """
    config, model_dir = find_config(flags["model"], progress=progress)
    dtype = str(_value(flags, "dtype") or _own_dtype(config))
    given = _value(flags, "kv_cache_dtype") or "auto"
    kv_dtype = ("bfloat16" if dtype == "int8" else dtype) if given == "auto" else str(given)
    shape = KVShape.from_config(config)
    numbers = MemoryEstimate(shape, kv_dtype, int(_value(flags, "block_size") or 16))
    contexts = _values(flags, "context", (2048, 8192, 32768))
    lines = [_headline(numbers), "", *_requests(numbers, contexts, _values(flags, "concurrency", (1, 10)))]
    memory = _value(flags, "memory")
    if memory is not None:
        weights, how = _weights(flags, config, model_dir, VALUE_BYTES[dtype])
        buffers = int(_value(flags, "buffers") or 0)
        lines += [
            "",
            f"{_gib(int(memory))} of memory - {_gib(weights)} of weights ({how}) - {_gib(buffers)} of buffers",
        ]
        lines += _fits(numbers, contexts, int(memory) - weights - buffers, _value(flags, "average"))
    return "\n".join(lines)


def _headline(numbers: MemoryEstimate) -> str:
    shape = numbers.shape
    windows = sorted({window for window in shape.windows if window is not None})
    text = (
        f"{shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim}, KV in {numbers.kv_dtype}: "
        f"{numbers.token_bytes:,} bytes a token, {_gib(numbers.paged_bytes(1))} a block of {numbers.block_size}"
    )
    if windows:
        num_sliding = sum(window is not None for window in shape.windows)
        text += f"\n{num_sliding} layers look back {', '.join(f'{window:,}' for window in windows)} tokens only"
    return text


def _requests(numbers: MemoryEstimate, contexts: tuple[int, ...], concurrencies: tuple[int, ...]) -> list[str]:
    has_windows = any(window is not None for window in numbers.shape.windows)
    head = ["context", "bytes a request", *(f"{count:,} requests" for count in concurrencies)]
    rows = [head + (["a request, if windows forgot"] if has_windows else [])]
    for context in contexts:
        own = numbers.paged_bytes(context)
        row = [f"{context:,}", f"{own:,}", *(_gib(count * own) for count in concurrencies)]
        rows.append(row + ([_gib(numbers.windowed_bytes(context))] if has_windows else []))
    return _table(rows)


def _fits(numbers: MemoryEstimate, contexts: tuple[int, ...], available: int, average: object) -> list[str]:
    if available <= 0:
        return [f"leaves nothing for KV: {_gib(-available)} are missing"]
    rows = [["context", "fit preallocated", "fit in blocks", "holding on average"]]
    for context in contexts:
        held = int(str(average)) if average is not None else max(1, context // 4)
        preallocated = numbers.num_preallocated(available, context)
        rows.append([f"{context:,}", f"{preallocated:,}", f"{numbers.num_paged(available, held):,}", f"{held:,}"])
    return [f"leaves {_gib(available)} for KV, {available // numbers.token_bytes:,} tokens", "", *_table(rows)]


def _weights(
    flags: Mapping[str, str], config: Mapping[str, Any], model_dir: Path | None, value_bytes: int
) -> tuple[int, str]:
    given = _value(flags, "weights")
    if given is not None:
        return int(given), "given"
    stored = stored_parameters(model_dir) if model_dir is not None else None
    if stored is not None:
        return stored * value_bytes, f"{stored:,} parameters in the files"
    described = count_parameters(config)
    return described * value_bytes, f"about {described:,} parameters by the config"


def _own_dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    part = text if isinstance(text, Mapping) else {}
    own = next((each[name] for each in (config, part) for name in ("dtype", "torch_dtype") if each.get(name)), None)
    return str(own) if own in VALUE_BYTES else "float16"


def _value(flags: Mapping[str, str], name: str) -> Any:
    return None if name not in flags else _parse(name, flags[name])


def _values(flags: Mapping[str, str], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if name not in flags else tuple(int(_parse(name, part)) for part in flags[name].split(","))


def _parse(name: str, text: str) -> Any:
    value_type = OPTIONS[name][0]
    try:
        return value_type.parse(text.strip())
    except ValueError:
        flag = f"--{name.replace('_', '-')}"
        raise SettingError(f"{flag}: {text!r} is wrong, it must be {value_type.expects}") from None


def _gib(num_bytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:,.2f} {unit}"
    return f"{num_bytes} B"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
