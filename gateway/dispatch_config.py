"""What the dispatch half of a gateway is told at start; built once by the command line."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How nodes are found and when one is lost.

    A node is lost when its connection is, when it has not answered a Ping for `silence_s`, or when its engine
    has had work for `stall_s` without finishing a step. The same incarnation is tried again after
    `reconnect_s`. Node and gateway may differ on what is under way for `forget_s`: then the
    one that has forgotten is right.
    """

    poll_s: float = 1.0
    ping_s: float = 1.0
    silence_s: float = 5.0
    stall_s: float = 20.0
    connect_timeout_s: float = 3.0
    reconnect_s: float = 2.0
    forget_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Limits and weights of admission, routing and the attempts of a request.

    `min_disaggregated_tokens`: shorter prompts are prefilled on the decode node. `affinity_weight`: how many
    running sequences a wholly cached prompt is worth when a decode node is chosen. `gap_timeout_s`: how long
    a missing chunk may be overtaken before the attempt is given up.
    """

    max_inflight: int = 256
    max_ttft_s: float = 60.0
    max_attempts: int = 3
    migration_wait_s: float = 8.0  # a restarted decode node is back in about 7 s; a client must hear within 10 s
    min_disaggregated_tokens: int = 0
    affinity_weight: float = 4.0
    gap_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig:
    """When the whole path is tried with a real token.

    With `expected_*` nodes, a gateway is not ready before it has had so many, each of them in a proven path; later
    losses do not count against it as long as a path is left.
    """

    interval_s: float = 30.0
    timeout_s: float = 10.0
    retry_s: float = 0.5
    expected_prefill_nodes: int = 0
    expected_decode_nodes: int = 0
