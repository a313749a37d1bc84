"""The prefill node process."""

import asyncio
import secrets
from functools import partial

from pdserve.control.kv_event_feed import KVEventFeed
from pdserve.control.lease_keeper import LeaseKeeper
from pdserve.control.messages import NodeRole
from pdserve.control.node_host import HostLimits, NodeHost
from pdserve.control.node_process import node_resources, serve_until_stopped
from pdserve.control.node_reports import kv_layout, node_info, node_load
from pdserve.control.span_log import SpanLog
from pdserve.control.transfer_reports import measure_link, peer_reports
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.freed_memory import return_freed_memory, share_one_heap
from pdserve.kvtransfer.config import SenderConfig
from pdserve.kvtransfer.sender import BlockSender
from pdserve.prefill_node.config import PrefillNodeConfig
from pdserve.prefill_node.prefill_worker import PrefillWorker


async def run_prefill_node(config: PrefillNodeConfig) -> int:
    """Load, register, serve; return the exit code. This function is the process."""
    node, incarnation = config.node, secrets.token_hex(8)
    share_one_heap()
    loaded = await asyncio.to_thread(Engine.load, config.engine)
    return_freed_memory()
    async with (
        EngineThread.start(loaded, config.engine.core_share_file, config.engine.tpot_target_s) as engine,
        node_resources(node) as resources,
        KVEventFeed.open(resources.context, node.kv_events, engine) as events,
        SpanLog.open(node.node_id, node.transfer_spans_file) as spans,
    ):
        layout = kv_layout(engine)
        limits = SenderConfig(
            lease_s=config.transfer_lease_s,
            curve=node.keys,
            wire_dtype=config.wire_dtype,
            compression=config.wire_compression,
            uses_shortcuts=config.uses_shortcuts,
            shared_memory="auto" if config.uses_shortcuts else "never",
            on_span=spans.hook,
        )
        async with BlockSender(
            resources.context, node_id=node.node_id, incarnation=incarnation, layout=layout, config=limits
        ) as sender:
            info = node_info(
                node,
                NodeRole.PREFILL,
                engine,
                incarnation=incarnation,
                control_endpoint=resources.server.endpoint,
                transfer_endpoint=None,
                events_endpoints=events.endpoints,
            )
            worker = PrefillWorker(engine, sender, config.transfer_timeout_s)
            host = NodeHost(
                resources.server,
                info,
                lambda is_draining: node_load(engine, sender.counts(), is_draining, peer_reports(sender)),
                worker.run,
                HostLimits(max_tasks=node.max_tasks, gateway_lease_s=node.gateway_lease_s),
                run_probe=partial(measure_link, sender),
            )
            lease = LeaseKeeper(resources.registry, info)
            parts = (engine.wait_stopped(), sender.watch(), *events.parts())
            return await serve_until_stopped(host, lease, parts, node.drain_s)
