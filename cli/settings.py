"""Every setting of pdserve, declared once: flags, environment, TOML keys and reference derive from here.

`Settings` is one frozen set of values; `setting_sources.py` resolves it, `processes.py` cuts each process's
configuration from it. Those of `pdserve generate` alone are in `generation_settings.py`.
"""

from dataclasses import dataclass, fields

from pdserve.cli import value_types
from pdserve.cli.generation_settings import GenerationSettings
from pdserve.cli.http_settings import HttpSettings
from pdserve.cli.scheduling_settings import SchedulingSettings
from pdserve.cli.setting_spec import (
    CLUSTER,
    DOCTOR,
    ENGINES,
    EVERY,
    GATEWAY,
    HEALTH,
    HTTP,
    LOADING,
    MEMBERS,
    NODES,
    SERVE,
    Command,
    Group,
    SettingSpec,
    setting,
    spec_of,
)
from pdserve.engine.swap_rule import PreemptionMode
from pdserve.kvtransfer.kv_events import KVEventFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(HttpSettings, SchedulingSettings, GenerationSettings):
    """One value for each setting, resolved from flags, environment, file and defaults."""

    model: str = setting(
        "demo",
        value_types.text(),
        Group.MODEL,
        LOADING,
        'what to serve: a Hugging Face directory, a .gguf file, a hub id, or "demo" (SmolLM2-135M-Instruct)',
    )
    served_model_name: str | None = setting(
        None,
        value_types.text(),
        Group.MODEL,
        CLUSTER,
        "the name clients use; by default the directory's, and the demo model's is smollm2-135m-instruct",
    )
    chat_template: str | None = setting(
        None, value_types.text(), Group.MODEL, HTTP, "file with a Jinja chat template, instead of the model's own"
    )
    generation_config: str = setting(
        "model",
        value_types.choice("model", "none"),
        Group.MODEL,
        HTTP,
        "where a request says nothing of sampling: as the model's generation_config.json recommends, or none of it",
    )
    max_model_len: int | None = setting(
        None,
        value_types.whole(1),
        Group.MODEL,
        LOADING,
        "most tokens of prompt and output together; by default the model's own limit",
    )
    prefill_nodes: int = setting(
        1,
        value_types.whole(0, 64),
        Group.PROCESSES,
        SERVE,
        "prefill nodes to start; 0 lets the decode nodes compute the prompts themselves",
    )
    decode_nodes: int = setting(1, value_types.whole(1, 64), Group.PROCESSES, SERVE, "decode nodes to start")
    prefill_niceness: int = setting(
        5,
        value_types.whole(0, 19),
        Group.PROCESSES,
        SERVE,
        "added to the niceness of prefill nodes, so that running streams go first where both want a core; 0: alike",
    )
    share_cores: bool = setting(
        True,
        value_types.switch(),
        Group.PROCESSES,
        SERVE,
        "nodes that compute at the same time divide the cores between them, and one that computes alone has all; off: "
        "each uses all, and the system divides them",
    )
    expected_prefill_nodes: int = setting(
        0,
        value_types.whole(0, 4096),
        Group.PROCESSES,
        GATEWAY,
        "not ready before so many prefill nodes have been proven; serve fills this in",
    )
    expected_decode_nodes: int = setting(
        0,
        value_types.whole(0, 4096),
        Group.PROCESSES,
        GATEWAY,
        "not ready before so many decode nodes have been proven; serve fills this in",
    )
    start_timeout_s: float = setting(
        600.0,
        value_types.number(1, 86_400),
        Group.PROCESSES,
        SERVE,
        "give up when no token has passed the whole path after this many seconds",
    )
    drain_s: float = setting(
        2.0,
        value_types.number(0, 3_600),
        Group.NETWORK,
        CLUSTER - SERVE,
        "how many seconds running requests may go on after SIGTERM",
    )
    max_inflight: int = setting(
        256, value_types.whole(1, 2**20), Group.ADMISSION, HTTP, "most sequences generated at a time; more are refused"
    )
    max_ttft_s: float = setting(
        60.0,
        value_types.number(0.01, 86_400),
        Group.ADMISSION,
        HTTP,
        "refuse a request whose first token, behind what waits already, is estimated to take longer",
    )
    min_disaggregated_tokens: int = setting(
        0, value_types.whole(0), Group.ADMISSION, HTTP, "prompts with fewer tokens are computed on the decode node"
    )
    advertise_host: str | None = setting(
        None,
        value_types.text(),
        Group.NETWORK,
        MEMBERS,
        "address at which others reach this node; by default --host, this machine's own instead of 0.0.0.0",
    )
    node_id: str | None = setting(
        None,
        value_types.text(max_bytes=128),  # what either plane can say
        Group.NETWORK,
        NODES,
        "name of this node; by default role and a random part",
    )
    redis_url: str | None = setting(
        None,
        value_types.redis_url(),
        Group.NETWORK,
        CLUSTER | HEALTH | DOCTOR,
        "Redis to use, with password, ACL user, TLS or Sentinel; serve starts its own when none is given",
        environment_name="REDIS_URL",
        secret=True,
    )
    namespace: str = setting(
        "default",
        value_types.matching(r"[A-Za-z0-9_.-]{1,64}", "1 to 64 letters, digits, dots, dashes or underscores"),
        Group.NETWORK,
        CLUSTER - SERVE | HEALTH | DOCTOR,
        "part of every Redis key: processes with the same one work together",
    )
    transfer_key_file: str | None = setting(
        None,
        value_types.text(),
        Group.NETWORK,
        CLUSTER | HEALTH | DOCTOR,
        "file with the secret key that gateways and nodes share: what they say and KV blocks are encrypted, and "
        "strangers kept out; `pdserve keys generate FILE` makes it",
    )
    transfer_key: str | None = setting(
        None,
        value_types.text(),
        Group.NETWORK,
        CLUSTER | HEALTH | DOCTOR,
        "that key itself, where a secret is a variable and not a file",
        secret=True,
    )
    transfer_spans_file: str | None = setting(
        None,
        value_types.text(),
        Group.NETWORK,
        NODES | SERVE,
        "append a line of JSON for each transfer of KV blocks that ends: how long its stages took, with the request id",
    )
    probe_size: int = setting(
        8 * 2**20,
        value_types.size(1024),
        Group.NETWORK,
        DOCTOR,
        "bytes sent over each link to measure it, at most 64 MiB",
    )
    probe_timeout_s: float = setting(
        15.0,
        value_types.number(0.1, 600),
        Group.NETWORK,
        DOCTOR,
        "how long one link may take to be measured",
    )
    json: bool = setting(False, value_types.switch(), Group.LOGGING, DOCTOR, "print one JSON object instead of tables")
    wire_dtype: str = setting(
        "auto",
        value_types.choice("auto", "int8"),
        Group.NETWORK,
        frozenset({Command.PREFILL, Command.SERVE}),
        "type in which KV blocks travel: auto is the narrower of both nodes' --kv-cache-dtype; int8 costs accuracy",
    )
    wire_compression: str = setting(
        "auto",
        value_types.choice("auto", "none", "zstd"),
        Group.NETWORK,
        frozenset({Command.PREFILL, Command.SERVE}),
        "compression of KV blocks between nodes: auto is zstd where the measured link is slow enough for it to pay",
    )
    local_transport: str = setting(
        "auto",
        value_types.choice("auto", "tcp"),
        Group.NETWORK,
        frozenset({Command.PREFILL, Command.SERVE}),
        "how KV blocks reach a node of the same machine: auto is a Unix socket, and shared memory where that is "
        "measured to be faster; tcp is as on any other machine",
    )
    dtype: str = setting(
        "float32",
        value_types.choice("float32", "bfloat16", "float16", "int8", "auto"),
        Group.ENGINE,
        ENGINES,
        "type of weights and computation; int8 weights compute in float32; auto is int8 where the compiled CPU kernels "
        "run a family whose perplexity was measured to stay within 1 %, else float32",
    )
    kv_cache_dtype: str = setting(
        "auto",
        value_types.choice("auto", "float32", "bfloat16", "float16", "int8", "fp8", note="; fp8 needs a GPU"),
        Group.ENGINE,
        ENGINES,
        "type of cached keys and values: auto is --dtype, and bfloat16 beside int8 weights; int8 has a scale for each "
        "token and head",
    )
    model_impl: str = setting(
        "auto",
        value_types.choice("auto", "own", "transformers"),
        Group.ENGINE,
        ENGINES,
        "whose code computes the model: pdserve's own decoder, transformers' modelling code, or own where there is one",
    )
    num_threads: int | None = setting(
        None,
        value_types.whole(1, 1024),
        Group.ENGINE,
        ENGINES,
        "CPU threads of a node; by default all cores that it may use, in a container no more than its share",
    )
    core_share_file: str | None = setting(
        None,
        value_types.text(),
        Group.ENGINE,
        NODES | SERVE,
        "file through which the nodes of one machine tell each other that they compute, so that each uses its part of "
        "the cores; serve makes one",
    )
    block_size: int = setting(16, value_types.whole(1, 1024), Group.ENGINE, ENGINES, "tokens in one KV block")
    device: str = setting(
        "auto",
        value_types.matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N"),
        Group.ENGINE,
        ENGINES,
        "where a node computes: auto is a GPU where torch sees one and triton is installed, else the CPU",
    )
    kv_memory: int | None = setting(
        None,
        value_types.size(2**20),
        Group.ENGINE,
        ENGINES,
        "memory for the KV blocks of a node; by default 2GiB, on a GPU what --gpu-memory-utilization leaves",
    )
    gpu_memory_utilization: float = setting(
        0.9,
        value_types.number(0.01, 1),
        Group.ENGINE,
        ENGINES,
        "share of a GPU's memory for weights, steps and KV blocks of a node; serve divides it among its nodes",
    )
    batch_invariant: bool = setting(
        False,
        value_types.switch(),
        Group.ENGINE,
        ENGINES,
        "on a GPU: fixed splits and tiles, so that a sequence has the same bits in any batch; slower",
    )
    enforce_eager: bool = setting(
        False, value_types.switch(), Group.ENGINE, ENGINES, "on a GPU: run decode steps without CUDA graphs"
    )
    num_blocks: int | None = setting(
        None, value_types.whole(1), Group.ENGINE, ENGINES, "KV blocks, instead of --kv-memory"
    )
    kv_host_memory: int = setting(
        0,
        value_types.size(0),
        Group.ENGINE,
        ENGINES,
        "memory for KV blocks that leave --kv-memory, and for those of preempted sequences; 0 is none",
    )
    kv_disk_dir: str | None = setting(
        None,
        value_types.text(),
        Group.ENGINE,
        ENGINES,
        "directory for KV blocks that leave --kv-host-memory; each node takes a part kv-N of it, which it finds again",
    )
    kv_disk_size: int = setting(
        10 * 2**30, value_types.size(2**20), Group.ENGINE, ENGINES, "most bytes of KV blocks that a node keeps on disk"
    )
    preemption_mode: str = setting(
        "auto",
        value_types.choice(*PreemptionMode),
        Group.ENGINE,
        ENGINES,
        "where blocks run out: keep what a sequence has in --kv-host-memory, compute it again, or whichever is cheaper",
    )
    kv_events_port: int | None = setting(
        None,
        value_types.whole(0, 65_534),
        Group.NETWORK,
        NODES | SERVE,
        "publish what the prefix cache holds, as vLLM's KV events, on this port, with replay on the next; 0 takes free "
        "ports; with serve each node has the next two; off by default",
    )
    kv_events_host: str = setting(
        "127.0.0.1",
        value_types.text(),
        Group.NETWORK,
        NODES,
        "address on which KV events are published; they hold token ids, so beyond this machine --transfer-key-file is "
        "needed",
    )
    kv_events_format: str = setting(
        KVEventFormat.ARRAY,
        value_types.choice(*KVEventFormat),
        Group.NETWORK,
        NODES | SERVE,
        "how KV events are written: array, as vLLM up to 0.23 does, or map, as from 0.26 on",
    )
    max_num_seqs: int = setting(
        64, value_types.whole(1, 4096), Group.ENGINE, ENGINES, "most sequences computed in one step"
    )
    max_num_batched_tokens: int = setting(
        512, value_types.whole(1, 2**20), Group.ENGINE, ENGINES, "most tokens computed in one step"
    )
    prefix_cache: bool = setting(
        True,
        value_types.switch(),
        Group.ENGINE,
        ENGINES,
        "keep the KV of finished prompts for those that begin alike",
    )
    speculative_config: str | None = setting(
        None,
        value_types.speculative_config(),
        Group.ENGINE,
        ENGINES - {Command.PREFILL},
        "speculative decoding, as vLLM writes it: "
        '{"method": "ngram", "num_speculative_tokens": 4} or {"model": DIR, "num_speculative_tokens": 4}',
    )
    log_level: str = setting(
        "info",
        value_types.choice("debug", "info", "warning", "error"),
        Group.LOGGING,
        EVERY,
        "least severity that is logged",
    )
    log_format: str = setting(
        "text",
        value_types.choice("text", "json"),
        Group.LOGGING,
        EVERY,
        "lines for people, or one JSON object a line",
    )


SPECS = tuple(spec_of(field.name, field.metadata) for field in fields(Settings))


def specs_of(command: Command) -> tuple[SettingSpec, ...]:
    """Return the settings of `command`, in the order of the table."""
    return tuple(spec for spec in SPECS if command in spec.commands)
