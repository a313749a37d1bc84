"""Between the engine's words and the control plane's: tasks to sequences, outputs to chunks, snapshots to
loads.
"""

from dataclasses import replace

from pdserve import __version__
from pdserve.control.messages import (
    BlockCounts,
    GenerationTask,
    NodeInfo,
    NodeLoad,
    NodeRole,
    PeerCounts,
    SpeculationCounts,
    TierCounts,
    TokenChunk,
    TokenLogprobs,
    TransferCounts,
)
from pdserve.control.node_config import NodeConfig
from pdserve.engine.engine_thread import EngineThread
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import StepOutput
from pdserve.kvtransfer.counters import TransferCounts as MovedCounts
from pdserve.kvtransfer.layout import KVLayout
from pdserve.kvtransfer.sockets import is_local


def sequence_specs(task: GenerationTask, is_export: bool = False) -> tuple[SequenceSpec, ...]:
    """Return what the engine is asked for: one sequence a branch."""
    first = SequenceSpec(
        seq_id=task.attempt_id,
        prompt_token_ids=task.prompt_token_ids,
        sampling=task.sampling,
        salt=task.cache_salt,
        output_token_ids=task.output_token_ids,
        is_export=is_export,
    )
    others = (
        replace(first, seq_id=fork.attempt_id, sampling=replace(task.sampling, seed=fork.seed)) for fork in task.forks
    )
    return (first, *others)


def token_chunk(output: StepOutput, reports_cache: bool = True) -> TokenChunk:
    """Return the chunk for an output that has a token or an end; `reports_cache` where the prompt was computed."""
    token, scores = output.token, output.prompt_scores
    logprobs = None
    if token is not None and token.logprob is not None:
        logprobs = (TokenLogprobs(token.logprob, token.top_logprobs),)
    return TokenChunk(
        attempt_id=output.seq_id,
        start=output.output_position,
        token_ids=() if token is None or token.token_id is None else (token.token_id,),
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        num_cached_tokens=output.num_cached_tokens if reports_cache else None,
        prompt_logprobs=None if scores is None else tuple(TokenLogprobs(s.logprob, s.top_logprobs) for s in scores),
        queue_s=output.queue_s if reports_cache else None,
    )


def node_load(
    engine: EngineThread, moved: MovedCounts, is_draining: bool, peers: tuple[PeerCounts, ...] = ()
) -> NodeLoad:
    """Return the node's load as the router sees it."""
    load, blocks, guessed = engine.load, engine.load.blocks, engine.load.speculation
    return NodeLoad(
        ready=not is_draining and not engine.stopped.is_set(),
        running=load.num_running,
        waiting=load.num_waiting,
        waiting_tokens=load.num_uncomputed_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        progress_age_s=engine.progress_age_s,
        blocks=BlockCounts(blocks.total, blocks.free, blocks.cached, blocks.in_use, blocks.in_flight),
        transfer=TransferCounts(
            moved.bytes_sent, moved.bytes_received, moved.blocks_sent, moved.blocks_skipped, moved.open
        ),
        speculation=None
        if guessed is None
        else SpeculationCounts(guessed.method, guessed.num_drafted, guessed.num_accepted),
        tiers=tuple(
            TierCounts(t.tier, t.num_blocks, t.max_blocks, t.size_bytes, t.num_hits, t.num_misses, t.num_corrupt)
            for t in load.tiers
        ),
        preemptions=load.num_preemptions,
        swaps=load.num_swaps,
        peers=peers,
    )


def kv_layout(engine: EngineThread) -> KVLayout:
    """Return the shape contract of the engine's blocks."""
    facts = engine.facts
    return KVLayout(
        model_digest=facts.digest,
        num_layers=facts.num_layers,
        block_size=facts.block_size,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        dtype=facts.kv_dtype,
        model_revision=facts.revision,
        tokenizer_digest=facts.tokenizer_digest,
    )


def node_info(
    config: NodeConfig,
    role: NodeRole,
    engine: EngineThread,
    *,
    incarnation: str,
    control_endpoint: str,
    transfer_endpoint: str | None,
    events_endpoints: tuple[str, str] | None = None,
) -> NodeInfo:
    """Return who the node is; the endpoints are where its sockets are bound."""
    facts = engine.facts
    events, replay = events_endpoints or (None, None)
    return NodeInfo(
        node_id=config.node_id,
        role=role,
        incarnation=incarnation,
        control_endpoint=config.advertised(control_endpoint),
        transfer_endpoint=None if transfer_endpoint is None else config.advertised(transfer_endpoint),
        model_name=config.model_name,
        model_digest=kv_layout(engine).digest(),
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        num_blocks=engine.load.blocks.total,
        version=__version__,
        events_endpoint=None if events is None else _events_address(config, events),
        events_replay_endpoint=None if replay is None else _events_address(config, replay),
    )


def _events_address(config: NodeConfig, endpoint: str) -> str:
    """Events may be for this machine only while the node is for others."""
    return endpoint if is_local(endpoint) else config.advertised(endpoint)
