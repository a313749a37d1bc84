"""`pdserve bench`: load a running server and report its latencies, rates and goodput."""

import argparse
import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli.errors import CliError, SettingError
from pdserve.cli.load_plan import (
    Arrivals,
    Lengths,
    PlannedRequest,
    TraceScale,
    closed_loop,
    open_loop,
    read_trace,
)
from pdserve.cli.value_types import SettingValue, ValueType, choice, number, text, whole

if TYPE_CHECKING:  # aiohttp is loaded by the command, not by the parser of all commands
    from pdserve.cli.load_client import StreamRecord, Target

_SUMMARY = "load any OpenAI-compatible server with streams and report TTFT, TPOT, tokens per second and goodput"
_EXAMPLES = """\
examples:
  pdserve bench http://127.0.0.1:8000
  pdserve bench http://127.0.0.1:8000 --concurrency 16 --num-requests 32 --prompt-tokens 128 --output-tokens 128
  pdserve bench http://127.0.0.1:8000 --rate 0.5 --num-requests 60 --slo-ttft-ms 2000 --slo-tpot-ms 100
  pdserve bench http://127.0.0.1:8000 --trace azure.csv --divide-lengths 8 --stretch-time 20 --json result.json

Prompts are token ids from the seed and outputs have their full length (ignore_eos), so two servers that are
asked with the same options do the same work. With --rate or --trace the loop is open: requests arrive whether
or not earlier ones have ended. The key of a server that wants one: the environment variable %s."""

_COUNT = whole(1)
_POSITIVE = number(1e-6, 1e9)
OPTIONS: Mapping[str, tuple[ValueType, SettingValue, str]] = {
    "model": (text(), None, "name to ask for; by default the first that the server lists"),
    "num_requests": (whole(1, 1_000_000), 16, "requests in all"),
    "prompt_tokens": (_COUNT, 64, "tokens of a prompt"),
    "output_tokens": (_COUNT, 128, "tokens of an answer"),
    "shared_prefix": (whole(0), 0, "tokens at the start of a prompt that are the same in all"),
    "concurrency": (whole(1, 10_000), 1, "requests open at a time (closed loop)"),
    "rate": (_POSITIVE, None, "requests a second (open loop), whatever is open"),
    "arrivals": (choice("poisson", "constant"), "poisson", "how the requests of --rate are spaced"),
    "trace": (text(), None, "file with arrivals and lengths: CSV of the Azure form, or .jsonl of the Mooncake form"),
    "divide_lengths": (_POSITIVE, 1.0, "divide the lengths of the trace"),
    "stretch_time": (_POSITIVE, 1.0, "multiply the times of the trace"),
    "warmup": (whole(0, 1_000), 1, "requests before the measured ones, of other prompts"),
    "seed": (whole(0), 1, "of prompts and arrivals"),
    "slo_ttft_ms": (_POSITIVE, None, "a good request has its first token within this"),
    "slo_tpot_ms": (_POSITIVE, None, "and each further token takes at most this on average"),
    "request_timeout_s": (_POSITIVE, 600.0, "a request that takes longer has failed"),
    "json": (text(), None, "also write the result to this file; - for standard output, without the table"),
}
# Each of these says nothing in a loop of another kind, and is refused there.
_OF_A_CLOSED_LOOP = ("concurrency",)
_OF_A_RATE = ("arrivals",)
_OF_A_TRACE = ("divide_lengths", "stretch_time")
_NOT_OF_A_TRACE = ("prompt_tokens", "output_tokens", "shared_prefix")
API_KEY_ENVIRONMENT_NAME = "PDSERVE_BENCH_API_KEY"


def add_bench_options(commands: Any) -> None:
    """Declare the subcommand on argparse's collection of them."""
    parser = commands.add_parser(
        "bench",
        help=_SUMMARY,
        description=f"{_SUMMARY[0].upper()}{_SUMMARY[1:]}.",
        epilog=_EXAMPLES % API_KEY_ENVIRONMENT_NAME,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("url", metavar="URL", help="base URL of the server, without /v1")
    for name, (value_type, default, help_text) in OPTIONS.items():
        shown = help_text if default is None else f"{help_text} (default {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar=value_type.metavar, help=shown)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The values of `OPTIONS`, each under its name."""

    model: str | None
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int
    concurrency: int
    rate: float | None
    arrivals: str
    trace: str | None
    divide_lengths: float
    stretch_time: float
    warmup: int
    seed: int
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    request_timeout_s: float
    json: str | None


@dataclass(slots=True)
class _Load:
    """The model that was asked for, and the record of each request, as far as the load has come."""

    model: str | None
    records: "list[StreamRecord]"


def bench(flags: Mapping[str, str], environment: Mapping[str, str], *, progress: Callable[[str], None]) -> int:
    """Run the load, print what came of it and return the exit code: 1 if a request failed.

    Ctrl-C ends the load: then the result is of the requests that had ended, and the exit code 130.

    Raises:
        SettingError: an option has a wrong value, or the result could not be written.
        CliError: the server does not answer.
    """
    from pdserve.cli.file_check import check_output
    from pdserve.cli.load_client import StreamRecord, Target
    from pdserve.cli.load_report import Objectives, report_of, report_table

    options = _options(flags)
    url = flags["url"].rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise SettingError(f"URL is {flags['url']!r}; it must begin with http:// or https://")
    if options.json is not None and options.json != "-":
        check_output("--json", options.json)
    plan = _plan(options)
    target = Target(url, options.model, environment.get(API_KEY_ENVIRONMENT_NAME), options.request_timeout_s)
    load = _Load(options.model, [StreamRecord.of(request) for request in plan])
    is_interrupted = False
    try:
        asyncio.run(_run(target, plan, options, load, progress))
    except KeyboardInterrupt:
        load.records = [record for record in load.records if record.has_ended]
        if not load.records:
            raise
        is_interrupted = True
        progress(f"interrupted: {len(load.records)} of {len(plan)} requests had ended, and the result is theirs")
    report = report_of(load.records, Objectives(options.slo_ttft_ms, options.slo_tpot_ms))
    facts = {"url": url, "model": load.model, "is_interrupted": is_interrupted, "options": asdict(options)}
    result = json.dumps({**facts, **report.as_json()}, indent=1)
    print(result if options.json == "-" else report_table(report))
    if options.json is not None and options.json != "-":
        _write(Path(options.json), result + "\n")
    return 128 + signal.SIGINT if is_interrupted else int(report.num_failed > 0)


def _options(flags: Mapping[str, str]) -> BenchOptions:
    values: dict[str, Any] = {name: _value(flags, name) for name in OPTIONS}
    if values["trace"] is not None and values["rate"] is not None:
        raise SettingError("--trace has arrival times of its own: give --stretch-time, not --rate")
    if values["shared_prefix"] > values["prompt_tokens"]:
        raise SettingError(f"--shared-prefix is more than --prompt-tokens, {values['prompt_tokens']}")
    _refuse_without_effect(flags, "trace" if values["trace"] else "rate" if values["rate"] else None)
    return BenchOptions(**values)


def _refuse_without_effect(flags: Mapping[str, str], kind: str | None) -> None:
    """Refuse options that a loop of this kind would leave aside: who gave them believes that they were measured."""
    without_effect = {
        None: (*_OF_A_RATE, *_OF_A_TRACE),
        "rate": (*_OF_A_CLOSED_LOOP, *_OF_A_TRACE),
        "trace": (*_OF_A_CLOSED_LOOP, *_OF_A_RATE, *_NOT_OF_A_TRACE),
    }[kind]
    for name in without_effect:
        if name in flags:
            where = "without --rate or --trace" if kind is None else f"with --{kind}"
            raise SettingError(f"--{name.replace('_', '-')} has no effect {where}: leave it out")


def _value(flags: Mapping[str, str], name: str) -> SettingValue:
    value_type, default, _ = OPTIONS[name]
    given = flags.get(name)
    if given is None:
        return default
    try:
        return value_type.parse(given)
    except ValueError as error:
        raise SettingError(f"--{name.replace('_', '-')} is {given!r}; it must be {value_type.expects}") from error


def _plan(options: BenchOptions) -> tuple[PlannedRequest, ...]:
    if options.trace is not None:
        scale = TraceScale(options.divide_lengths, options.stretch_time)
        return read_trace(Path(options.trace), options.num_requests, scale, options.seed)
    lengths = Lengths(options.prompt_tokens, options.output_tokens, options.shared_prefix)
    plan = closed_loop(options.num_requests, lengths, options.seed)
    return plan if options.rate is None else open_loop(plan, options.rate, Arrivals(options.arrivals), options.seed)


async def _run(
    target: "Target",
    plan: tuple[PlannedRequest, ...],
    options: BenchOptions,
    load: _Load,
    progress: Callable[[str], None],
) -> None:
    from pdserve.cli.load_client import LoadClient

    lengths = Lengths(len(plan[0].prompt), min(4, plan[0].num_output))
    is_open = plan[0].arrives_at_s is not None
    async with LoadClient.open(target) as client:
        load.model = client.model
        for record in await client.run(closed_loop(options.warmup, lengths, options.seed + 1), concurrency=1):
            if record.error is not None:
                raise CliError(f"the warm-up failed: {record.error}")
        progress(f"{len(plan)} requests to {target.url}")
        await client.fill(load.records, plan, None if is_open else options.concurrency)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise CliError(f"--json {path}: {error}") from error
