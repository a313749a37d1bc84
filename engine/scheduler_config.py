"""How a scheduler decides: the limits of a step, the order of service, what is kept in reserve. Pure values."""

from dataclasses import dataclass
from enum import StrEnum


class SchedulingPolicy(StrEnum):
    """In which order sequences are served; the last of it is preempted first."""

    FCFS = "fcfs"  # first come, first served
    PRIORITY = "priority"  # the least `priority` first, first come first served among equal ones


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step (sequences and tokens in a batch, tokens in a sequence), prefix sharing, order and reserves.

    `short_prompt_share` of a step's prompt tokens goes to the shortest prompts, the rest to the first ones.
    `tpot_target_s` limits the prompt tokens of a step beside running streams by the time that steps take.
    `ttft_target_s` lets prompts whose first token cannot come in that time any more wait behind those whose can.
    `growth_reserve` is the share of the expected growth of running sequences that is kept free when another is
    started; one block for each always is. `max_waiting_s` ends sequences that wait for longer without a block.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_cache: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    short_prompt_share: float = 0.5
    tpot_target_s: float | None = None
    ttft_target_s: float | None = None
    growth_reserve: float = 0.0
    max_waiting_s: float | None = None
