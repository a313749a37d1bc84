"""How an answer was made, shown in it where its request asks for that."""

from typing import Any

from pdserve.gateway.generation_plan import GenerationPlan
from pdserve.gateway.running_choices import RunningChoices


def asked_route(plan: GenerationPlan, running: RunningChoices) -> dict[str, Any]:
    """Return `route_info` of an answer if it was asked for: of each choice nodes, attempts, cached tokens and times.

    Times are milliseconds from the admission of the choice.
    """
    if not plan.reply.return_route_info:
        return {}
    shown = [
        {
            "index": index,
            "route": choice.route,
            "prefill_node_id": choice.prefill_node_id,
            "decode_node_id": choice.decode_node_id,
            "num_attempts": choice.num_attempts,
            "cached_tokens": choice.num_cached_tokens,
            "seed": choice.seed,
            "stages_ms": {
                name.removesuffix("_ms"): None if value is None else round(value, 3)
                for name, value in choice.timings._asdict().items()
            },
        }
        for index, choice in enumerate(running.stats())
    ]
    return {"route_info": shown}
