"""The settings of the engine's scheduler: order, fairness, targets and reserves."""

from dataclasses import dataclass

from pdserve.cli import value_types
from pdserve.cli.setting_spec import ENGINES, HTTP, Group, setting
from pdserve.engine.scheduler_config import SchedulingPolicy


@dataclass(frozen=True, kw_only=True)  # no slots: `Settings` has another base with some, and Python allows one
class SchedulingSettings:
    """Which sequences a node computes first, and how it keeps its promises to those that run."""

    scheduling_policy: str = setting(
        "fcfs",
        value_types.choice(*SchedulingPolicy),
        Group.ENGINE,
        ENGINES | HTTP,
        "who is served first and gives way last: first come first served, or the least `priority` of a request first",
    )
    short_prompt_share: float = setting(
        0.5,
        value_types.number(0, 1),
        Group.ENGINE,
        ENGINES,
        "part of a step's prompt tokens for the shortest prompts, so that long ones do not hold them up; the rest goes "
        "in order",
    )
    tpot_target_ms: float | None = setting(
        None,
        value_types.number(0.1, 600_000),
        Group.ENGINE,
        ENGINES,
        "give prompts only so many tokens of a step that running streams get a token in this time (by default up to "
        "--max-num-batched-tokens), and prompts of other nodes on the same cores (--core-share-file) what streams "
        "leave of it",
    )
    ttft_target_ms: float | None = setting(
        None,
        value_types.number(0.1, 600_000),
        Group.ENGINE,
        ENGINES,
        "a prompt that cannot have its first token in this time any more waits behind those that can (late ones still "
        "get a ninth of the prompt tokens), so that an overload does not make everybody late",
    )
    growth_reserve: float = setting(
        0.5,
        value_types.number(0, 1),
        Group.ENGINE,
        ENGINES,
        "part of the KV blocks that running sequences are expected to need still, kept free when another is started",
    )
    max_waiting_s: float | None = setting(
        None,
        value_types.number(0.01, 86_400),
        Group.ENGINE,
        ENGINES,
        "end a request that waits in a node for so long without being computed (503); by default it waits on",
    )
