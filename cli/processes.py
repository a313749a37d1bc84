"""Cuts the configuration of each process from the settings and runs it; the only place that knows both."""

import asyncio
import ipaddress
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from pdserve.cli.device_check import check_device
from pdserve.cli.errors import SettingError
from pdserve.cli.file_check import check_files
from pdserve.cli.free_port import free_port
from pdserve.cli.http_access import check_access, http_config, read_chat_template
from pdserve.cli.setting_spec import Command
from pdserve.cli.settings import Settings
from pdserve.cli.transfer_key import load_transfer_keys
from pdserve.control.node_config import NodeConfig
from pdserve.engine.config import EngineConfig
from pdserve.engine.model_source import model_name_of, resolve_model
from pdserve.engine.speculative_config import SpeculativeConfig
from pdserve.engine.swap_rule import PreemptionMode
from pdserve.kvtransfer.curve_keys import CurveKeys
from pdserve.kvtransfer.kv_events import KVEventConfig, KVEventFormat

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

_WILDCARDS = frozenset({"0.0.0.0", "::"})
_REDIS_PORT = 6379


def run_gateway(settings: Settings, progress: Progress) -> int:
    """Run one gateway until it is stopped; return its exit code."""
    redis_url = required_redis_url(settings)
    free_port(settings.host, settings.port)  # before anything slow
    check_access(settings)
    keys = load_transfer_keys(settings.transfer_key_file, settings.transfer_key)
    chat_template = read_chat_template(settings.chat_template)
    model_dir = resolve_model(settings.model, progress=progress)
    from pdserve.gateway.config import GatewayConfig
    from pdserve.gateway.dispatch_config import CanaryConfig, DispatchConfig
    from pdserve.gateway.process import run_gateway as serve_http

    dispatch = DispatchConfig(
        max_inflight=settings.max_inflight,
        max_ttft_s=settings.max_ttft_s,
        min_disaggregated_tokens=settings.min_disaggregated_tokens,
    )
    config = GatewayConfig(
        model_dir=model_dir,
        redis_url=redis_url,
        http=http_config(settings, served_name(settings)),
        namespace=settings.namespace,
        keys=keys,
        chat_template=chat_template,
        uses_generation_config=settings.generation_config == "model",
        dispatch=dispatch,
        canary=CanaryConfig(
            expected_prefill_nodes=settings.expected_prefill_nodes,
            expected_decode_nodes=settings.expected_decode_nodes,
        ),
    )
    return asyncio.run(serve_http(config))


def run_prefill(settings: Settings, progress: Progress) -> int:
    """Run one prefill node until it is stopped; return its exit code."""
    node = node_config(settings, Command.PREFILL, load_transfer_keys(settings.transfer_key_file, settings.transfer_key))
    check_files(settings)
    check_device(settings.device)
    engine = engine_config(settings, progress)
    _let_signals_end_the_process()
    from pdserve.prefill_node.config import PrefillNodeConfig
    from pdserve.prefill_node.process import run_prefill_node

    config = PrefillNodeConfig(
        node=node,
        engine=engine,
        wire_dtype=settings.wire_dtype,
        wire_compression=settings.wire_compression,
        uses_shortcuts=settings.local_transport == "auto",
    )
    return asyncio.run(run_prefill_node(config))


def run_decode(settings: Settings, progress: Progress) -> int:
    """Run one decode node until it is stopped; return its exit code."""
    node = node_config(settings, Command.DECODE, load_transfer_keys(settings.transfer_key_file, settings.transfer_key))
    check_files(settings)
    check_device(settings.device)
    engine = engine_config(settings, progress)
    _let_signals_end_the_process()
    from pdserve.decode_node.config import DecodeNodeConfig
    from pdserve.decode_node.process import run_decode_node

    return asyncio.run(run_decode_node(DecodeNodeConfig(node=node, engine=engine)))


def _let_signals_end_the_process() -> None:
    """Let SIGTERM and SIGINT end this process where it stands, until the node handles them while it serves.

    Importing torch and loading a model are minutes of compiled code and of a thread that nothing interrupts; nothing is
    registered or promised yet that would have to be taken back. The first process of a container has no default.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_now if os.getpid() == 1 else signal.SIG_DFL)


def _exit_now(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def node_config(settings: Settings, role: Command, keys: CurveKeys | None = None) -> NodeConfig:
    """Return a node's place among the others.

    Raises:
        SettingError: there is no Redis to meet them at, or events would leave the machine in the clear.
    """
    node_id = settings.node_id or f"{role}-{secrets.token_hex(4)}"
    redis_url = required_redis_url(settings)
    advertise_host = settings.advertise_host or advertised_host(settings.host, redis_url)
    if settings.host in _WILDCARDS and advertise_host is not None and _is_loopback(advertise_host):
        logger.warning(
            "this node listens on %s but tells others to reach it at %s, which only this machine can; "
            "for nodes on other machines give --advertise-host",
            settings.host,
            advertise_host,
        )
    return NodeConfig(
        node_id=node_id,
        redis_url=redis_url,
        namespace=settings.namespace,
        host=settings.host,
        advertise_host=advertise_host,
        keys=keys,
        model_name=served_name(settings),
        drain_s=settings.drain_s,
        kv_events=kv_event_config(settings, node_id, keys),
        transfer_spans_file=settings.transfer_spans_file,
    )


def kv_event_config(settings: Settings, node_id: str, keys: CurveKeys | None) -> KVEventConfig | None:
    """Return how a node publishes its KV events; None where it does not.

    Raises:
        SettingError: they would leave the machine in the clear.
    """
    port, host = settings.kv_events_port, settings.kv_events_host
    if port is None:
        return None
    base = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    try:
        return KVEventConfig(
            endpoint=f"{base}:{port}",
            replay_endpoint=f"{base}:{port + 1 if port else 0}",
            topic=f"kv@{node_id}@{served_name(settings)}",
            format=KVEventFormat(settings.kv_events_format),
            curve=keys,
        )
    except ValueError:
        raise SettingError(
            f"--kv-events-host: KV events hold what users wrote; on {host} they need --transfer-key-file"
        ) from None


def engine_config(settings: Settings, progress: Progress) -> EngineConfig:
    """Return the configuration of an engine, with the model fetched and converted if need be."""
    model_dir = resolve_model(settings.model, progress=progress)
    progress(f"loading {model_dir.name} as {settings.dtype}")
    return EngineConfig(
        model_dir=model_dir,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        batch_invariant=settings.batch_invariant,
        enforce_eager=settings.enforce_eager,
        model_impl=settings.model_impl,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory,
        num_blocks=settings.num_blocks,
        kv_host_memory_bytes=settings.kv_host_memory,
        kv_disk_dir=None if settings.kv_disk_dir is None else Path(settings.kv_disk_dir),
        kv_disk_bytes=settings.kv_disk_size,
        preemption_mode=PreemptionMode(settings.preemption_mode),
        logs_cache_changes=settings.kv_events_port is not None,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        num_threads=settings.num_threads,
        core_share_file=None if settings.core_share_file is None else Path(settings.core_share_file),
        enable_prefix_cache=settings.prefix_cache,
        scheduling_policy=settings.scheduling_policy,
        short_prompt_share=settings.short_prompt_share,
        tpot_target_ms=settings.tpot_target_ms,
        ttft_target_ms=settings.ttft_target_ms,
        growth_reserve=settings.growth_reserve,
        max_waiting_s=settings.max_waiting_s,
        speculative_config=_speculative_config(settings, progress),
    )


def _speculative_config(settings: Settings, progress: Progress) -> SpeculativeConfig | None:
    if settings.speculative_config is None:
        return None
    config = SpeculativeConfig.from_json(settings.speculative_config)
    if config.model is None:
        return config
    return replace(config, model=str(resolve_model(config.model, progress=progress)))


def served_name(settings: Settings) -> str:
    """Return the name under which clients ask for the model."""
    return settings.served_model_name or model_name_of(settings.model)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def required_redis_url(settings: Settings) -> str:
    """Return the URL of Redis.

    Raises:
        SettingError: none is given.
    """
    if settings.redis_url is None:
        raise SettingError(
            "--redis-url (env REDIS_URL): not given; gateway and nodes find each other in Redis, "
            "for example redis://127.0.0.1:6379/0 (`pdserve serve` brings its own)"
        )
    return settings.redis_url


def advertised_host(host: str, redis_url: str) -> str | None:
    """Return the address by which this machine reaches Redis if `host` is a wildcard, else None: `host` itself."""
    if host not in _WILDCARDS:
        return None
    target = urlsplit(redis_url)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            target.hostname or "localhost", target.port or _REDIS_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: the kernel chooses the address that a packet would have
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise SettingError(
            f"--advertise-host: needed with --host {host}, as this machine's address towards Redis "
            f"cannot be found ({error})"
        ) from None
