"""`pdserve serve`: Redis, prefill nodes, decode nodes and the gateway as processes on this machine."""

import asyncio
import contextlib
import json
import secrets
import shlex
import signal
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.cli.child_process import ChildProcess, ChildSpec, pdserve_command
from pdserve.cli.device_check import check_device
from pdserve.cli.embedded_redis import EmbeddedRedis, embedded_redis
from pdserve.cli.errors import ChildFailed
from pdserve.cli.file_check import check_files
from pdserve.cli.free_port import free_port
from pdserve.cli.http_access import check_access, read_chat_template
from pdserve.cli.progress import ProgressPrinter
from pdserve.cli.setting_spec import Command
from pdserve.cli.settings import Settings, specs_of
from pdserve.cli.supervisor import RestartPolicy, Supervisor
from pdserve.cli.transfer_key import load_transfer_keys
from pdserve.engine.available_cores import num_available_cores
from pdserve.engine.model_source import model_name_of, resolve_model

_REDIS_START_TIMEOUT_S = 10.0
_PROBE_INTERVAL_S = 0.1
_PROBE_TIMEOUT_S = 2.0
# Together under the 5 s in which everything must be gone: the gateway lets streams finish, then all nodes end at
# once, each after the engine step that it is in.
_GATEWAY_STOP_S = 2.0
_GATEWAY_DRAIN_S = 1.2
_NODE_STOP_S = 2.2
_NODE_DRAIN_S = 0.2
_REDIS_STOP_S = 0.3


@dataclass(frozen=True, slots=True)
class Fleet:
    """The children of one `serve`, by role; `redis` is None when an external one is used."""

    gateway: ChildProcess
    prefill_nodes: tuple[ChildProcess, ...]
    decode_nodes: tuple[ChildProcess, ...]
    redis: ChildProcess | None
    namespace: str


def serve(settings: Settings, printer: ProgressPrinter, environment: Mapping[str, str]) -> int:
    """Serve in the foreground until a signal or a failure; return the exit code.

    Raises:
        CliError: it cannot start, or a child failed for good.
    """
    load_transfer_keys(settings.transfer_key_file, settings.transfer_key)  # what is wrong with it is said here, once
    check_access(settings)
    read_chat_template(settings.chat_template)
    check_files(settings)
    check_device(settings.device)
    port = free_port(settings.host, settings.port)
    if settings.redis_url is not None:
        from pdserve.cli.redis_check import check_redis  # needs redis-py, which takes a while to load

        check_redis(settings.redis_url)
    model_dir = resolve_model(settings.model, progress=printer.say)
    name = settings.served_model_name or model_name_of(settings.model)
    settings = replace(settings, port=port, served_model_name=name)
    with contextlib.ExitStack() as stack:
        redis = None if settings.redis_url else stack.enter_context(embedded_redis())
        if settings.share_cores and settings.core_share_file is None:
            private = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-cores-"))
            settings = replace(settings, core_share_file=str(Path(private) / "busy"))
        asyncio.run(_Serve(settings, model_dir, printer, environment, redis).run())
    printer.say("stopped")
    return 0


class _Serve:
    """One run of `pdserve serve`."""

    def __init__(
        self,
        settings: Settings,
        model_dir: Path,
        printer: ProgressPrinter,
        environment: Mapping[str, str],
        redis: EmbeddedRedis | None,
    ) -> None:
        self._settings = settings
        self._printer = printer
        self._redis = redis
        self._stop = asyncio.Event()
        self._supervisor = Supervisor(printer, self._stop, RestartPolicy())
        self._fleet = _fleet_of(settings, model_dir, printer, environment, redis)

    async def run(self) -> None:
        """Start the fleet, announce it when a token has passed the whole path, stop it at the end."""
        with _stop_signals(self._stop, self._printer, self._kill_all):
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._start_redis(tasks)
                    self._start(tasks, (*self._fleet.prefill_nodes, *self._fleet.decode_nodes, self._fleet.gateway))
                    await self._announce_when_ready()
                    await self._stop.wait()
                    await self._supervisor.stop_in_order(self._stages())
            finally:
                self._kill_all()
        if self._supervisor.failure is not None:
            raise self._supervisor.failure

    def _start(self, tasks: asyncio.TaskGroup, children: Sequence[ChildProcess]) -> None:
        if self._stop.is_set():
            return
        self._printer.say(f"starting {', '.join(child.spec.name for child in children)}")
        for child in children:
            tasks.create_task(self._supervisor.keep_running(child), name=f"keep {child.spec.name} running")

    async def _start_redis(self, tasks: asyncio.TaskGroup) -> None:
        if self._redis is None or self._fleet.redis is None:
            return
        self._start(tasks, (self._fleet.redis,))
        deadline = time.monotonic() + _REDIS_START_TIMEOUT_S
        while not self._stop.is_set() and not await self._redis.is_answering():
            if time.monotonic() > deadline:
                story = "\n".join(self._fleet.redis.last_lines)
                self._supervisor.fail(
                    ChildFailed(f"redis did not answer within {_REDIS_START_TIMEOUT_S:.0f} s:\n{story}")
                )
            await self._supervisor.is_stopped_within(_PROBE_INTERVAL_S)

    async def _announce_when_ready(self) -> None:
        started_at = time.monotonic()
        is_https = self._settings.tls_cert_file is not None
        while not await _is_ready(_reachable(self._settings.host), self._settings.port, is_https):
            if await self._supervisor.is_stopped_within(_PROBE_INTERVAL_S):
                return
            if time.monotonic() - started_at > self._settings.start_timeout_s:
                limit = f"{self._settings.start_timeout_s:g} s (--start-timeout-s)"
                self._supervisor.fail(ChildFailed(f"no token has passed the whole path within {limit}"))
                return
        self._supervisor.allow_restarts()
        url = f"{'https' if is_https else 'http'}://{_url_host(self._settings.host)}:{self._settings.port}"
        self._printer.say(f"ready after {time.monotonic() - started_at:.1f} s: a token has passed the whole path")
        self._printer.say(f"serving {self._settings.served_model_name} on {url}/v1; Ctrl-C stops everything")
        doctor = doctor_command(self._fleet.namespace, self._redis, self._settings.transfer_key_file)
        self._printer.say(f"to measure the links between nodes: {doctor}")
        needs_key = bool(self._settings.api_keys or self._settings.api_keys_file)
        self._printer.plain(f"\n{curl_example(url, str(self._settings.served_model_name), needs_key)}\n")

    def _stages(self) -> list[tuple[Sequence[ChildProcess], float]]:
        redis = () if self._fleet.redis is None else (self._fleet.redis,)
        return [
            ((self._fleet.gateway,), _GATEWAY_STOP_S),
            ((*self._fleet.prefill_nodes, *self._fleet.decode_nodes), _NODE_STOP_S),
            (redis, _REDIS_STOP_S),
        ]

    def _kill_all(self) -> None:
        for children, _ in self._stages():
            for child in children:
                child.kill()


def curl_example(url: str, model_name: str, needs_key: bool) -> str:
    """Return a command to paste: a streamed chat completion; a key is named as a variable, never shown."""
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model_name, "messages": [message], "temperature": 0, "stream": True})
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n  -d {shlex.quote(body)}"


def doctor_command(namespace: str, redis: EmbeddedRedis | None, key_file: str | None = None) -> str:
    """Return a command to paste, without a password: the URL is named as a variable, or as the file that holds it."""
    url = '"$REDIS_URL"' if redis is None else f'"$(cat {shlex.quote(str(redis.url_path))})"'
    keys = "" if key_file is None else f" --transfer-key-file {shlex.quote(key_file)}"
    return f"pdserve doctor --redis-url {url} --namespace {namespace}{keys}"


def _fleet_of(
    settings: Settings,
    model_dir: Path,
    printer: ProgressPrinter,
    environment: Mapping[str, str],
    redis: EmbeddedRedis | None,
) -> Fleet:
    """Describe the children. Each gets its settings as flags and only its secrets by environment."""
    inherited = {name: value for name, value in environment.items() if not name.startswith("PDSERVE_")}
    inherited["PYTHONUNBUFFERED"] = "1"
    # OpenMP teams that spin while they wait slow each other down tenfold where processes share cores.
    inherited |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
    shared = replace(
        settings,
        model=str(model_dir),
        redis_url=redis.url if redis else settings.redis_url,
        namespace=f"serve-{secrets.token_hex(6)}",  # two installations on one Redis never meet
    )
    num_threads = settings.num_threads or num_available_cores()
    node = replace(
        shared,
        host="127.0.0.1",
        num_threads=num_threads,
        drain_s=_NODE_DRAIN_S,
        # All nodes of one serve are on one GPU, if any.
        gpu_memory_utilization=max(
            0.01, settings.gpu_memory_utilization / (settings.prefill_nodes + settings.decode_nodes)
        ),
    )

    def child(name: str, command: Command, own: Settings) -> ChildProcess:
        flags, secret_environment = _arguments(command, own)
        niceness = settings.prefill_niceness if command is Command.PREFILL else 0
        spec = ChildSpec(name, pdserve_command(command, *flags), inherited | secret_environment, niceness=niceness)
        return ChildProcess(spec, printer.echo)

    def nodes(command: Command, count: int, first: int = 0) -> tuple[ChildProcess, ...]:
        own = [_with_own_ports(node, first + index) for index in range(count)]
        return tuple(child(f"{command}-{index}", command, one) for index, one in enumerate(own, 1))

    redis_child = None
    if redis is not None:
        redis_spec = ChildSpec("redis", redis.command, inherited, is_quiet=True)
        redis_child = ChildProcess(redis_spec, printer.echo)
    gateway = replace(
        shared,
        drain_s=_GATEWAY_DRAIN_S,
        expected_prefill_nodes=settings.prefill_nodes,
        expected_decode_nodes=settings.decode_nodes,
    )
    return Fleet(
        gateway=child("gateway", Command.GATEWAY, gateway),
        prefill_nodes=nodes(Command.PREFILL, settings.prefill_nodes),
        decode_nodes=nodes(Command.DECODE, settings.decode_nodes, settings.prefill_nodes),
        redis=redis_child,
        namespace=shared.namespace,
    )


def _with_own_ports(settings: Settings, index: int) -> Settings:
    """Give the node `index` of this machine two ports of its own for KV events, where the ports are fixed."""
    port = settings.kv_events_port
    return replace(settings, kv_events_port=port + 2 * index) if port else settings


def _arguments(command: Command, settings: Settings) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the environment that make `command` resolve to `settings`."""
    flags: list[str] = []
    environment: dict[str, str] = {}
    for spec in specs_of(command):
        value = getattr(settings, spec.name)
        if value == spec.default:
            continue
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        if spec.secret:
            environment[spec.environment_name] = text
        elif spec.value_type.is_switch:
            flags.append(spec.flag if value else f"--no-{spec.flag.removeprefix('--')}")
        else:
            flags.append(f"{spec.flag}={text}")
    return flags, environment


@contextlib.contextmanager
def _stop_signals(stop: asyncio.Event, printer: ProgressPrinter, kill_all: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM set `stop`; a second one kills."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            kill_all()
            return
        printer.say(f"{number.name}: stopping")
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _is_ready(host: str, port: int, is_https: bool) -> bool:
    """Return whether GET /ready answers 200 now; the certificate is for other names than the address used here."""
    context = ssl._create_unverified_context() if is_https else None
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(f"GET /ready HTTP/1.1\r\nHost: {_url_host(host)}\r\nConnection: close\r\n\r\n".encode())
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False


def _reachable(host: str) -> str:
    """Return where a server bound to `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _url_host(host: str) -> str:
    reachable = _reachable(host)
    return f"[{reachable}]" if ":" in reachable else reachable
