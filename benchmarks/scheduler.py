"""The bookkeeping of a step: schedule() and update() without a model, for growing batches and a long queue.

    .venv/bin/python benchmarks/scheduler.py

Prints microseconds a step and a sequence. Linear bookkeeping keeps the second column level.
"""

import argparse
import statistics
import time

from amounts import above_zero

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.prefix_tree import PrefixTree
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scheduler_config import SchedulerConfig
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.step_output import SampledToken

_BLOCK_SIZE = 16
_NUM_BLOCKS = 40_000


def measure(num_running: int, num_waiting: int, num_steps: int, num_prompt: int) -> float:
    """Return the median time of a step in microseconds, all of `num_running` decoding."""
    pool = BlockPool(_NUM_BLOCKS)
    config = SchedulerConfig(num_running, 4096, 8192, growth_reserve=0.5, max_waiting_s=3600.0)
    scheduler = Scheduler(config, pool, PrefixTree(pool, _BLOCK_SIZE), _BLOCK_SIZE, frozenset())
    sampling = SamplingParams(max_tokens=4000, seed=0)
    for index in range(num_running + num_waiting):
        prompt = tuple(index * num_prompt + place for place in range(num_prompt))
        scheduler.add(SequenceSpec(str(index), prompt, sampling))
    times = []
    while len(times) < num_steps:
        started = time.perf_counter()
        scheduler.expire(0.0)
        batch = scheduler.schedule(0.0)
        scheduler.update(batch, [SampledToken(1) if span.sampling is not None else None for span in batch.spans])
        _ = scheduler.num_uncomputed_tokens
        if len(batch.spans) == num_running == batch.num_tokens:  # the prompts are done
            times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=above_zero(int), default=200, help="steps measured for each row")
    parser.add_argument("--prompt", type=above_zero(int), default=512, help="tokens of each prompt")
    options = parser.parse_args()
    print(f"{'running':>8} {'waiting':>8} {'us/step':>10} {'us/sequence':>12}")
    for num_waiting in (0, 512):
        for num_running in (1, 2, 4, 8, 16, 32, 64):
            step_us = measure(num_running, num_waiting, options.steps, options.prompt)
            print(f"{num_running:>8} {num_waiting:>8} {step_us:>10.1f} {step_us / num_running:>12.2f}")


if __name__ == "__main__":
    main()
