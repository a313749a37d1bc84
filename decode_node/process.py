"""The decode node process."""

import asyncio
import secrets
from dataclasses import replace

from pdserve.control.kv_event_feed import KVEventFeed
from pdserve.control.lease_keeper import LeaseKeeper
from pdserve.control.messages import NodeRole
from pdserve.control.node_host import HostLimits, NodeHost
from pdserve.control.node_process import node_resources, serve_until_stopped
from pdserve.control.node_reports import kv_layout, node_info, node_load
from pdserve.control.span_log import SpanLog
from pdserve.control.transfer_reports import peer_reports
from pdserve.decode_node.config import DecodeNodeConfig
from pdserve.decode_node.decode_worker import DecodeWorker
from pdserve.engine.engine import Engine
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.freed_memory import return_freed_memory, share_one_heap
from pdserve.kvtransfer.config import ReceiverConfig
from pdserve.kvtransfer.frame_memory import keep_frame_memory
from pdserve.kvtransfer.receiver import BlockReceiver


async def run_decode_node(config: DecodeNodeConfig) -> int:
    """Load, register, serve; return the exit code. This function is the process."""
    node, incarnation = config.node, secrets.token_hex(8)
    keep_frame_memory()
    share_one_heap()
    loaded = await asyncio.to_thread(Engine.load, config.engine)
    return_freed_memory()
    async with (
        EngineThread.start(loaded, config.engine.core_share_file, config.engine.tpot_target_s) as engine,
        node_resources(node) as resources,
        KVEventFeed.open(resources.context, node.kv_events, engine) as events,
        SpanLog.open(node.node_id, node.transfer_spans_file) as spans,
    ):
        worker = DecodeWorker(engine, config, on_transfer=spans.label)
        async with BlockReceiver.bind(
            resources.context,
            node.bind_endpoint,
            node_id=node.node_id,
            incarnation=incarnation,
            layout=kv_layout(engine),
            sink=worker,
            config=replace(receiver_config(config), on_span=spans.hook),
        ) as receiver:
            info = node_info(
                node,
                NodeRole.DECODE,
                engine,
                incarnation=incarnation,
                control_endpoint=resources.server.endpoint,
                transfer_endpoint=receiver.endpoint,
                events_endpoints=events.endpoints,
            )
            host = NodeHost(
                resources.server,
                info,
                lambda is_draining: node_load(engine, receiver.counts(), is_draining, peer_reports(receiver)),
                lambda task, outbox: worker.run(task, outbox, receiver),
                HostLimits(max_tasks=node.max_tasks, gateway_lease_s=node.gateway_lease_s),
            )
            lease = LeaseKeeper(resources.registry, info)
            parts = (engine.wait_stopped(), receiver.watch(), *events.parts())
            return await serve_until_stopped(host, lease, parts, node.drain_s)


def receiver_config(config: DecodeNodeConfig) -> ReceiverConfig:
    """Return the limits of the KV plane; without keys the host is the operator's word that its network is private."""
    return ReceiverConfig(
        lease_s=config.transfer_lease_s,
        credit_bytes=config.transfer_credit_bytes,
        curve=config.node.keys,
        allow_plaintext=config.node.keys is None,
    )
