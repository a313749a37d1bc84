"""Whether a request is taken, decided before any work is done for it. Pure."""

import math
from dataclasses import dataclass

from pdserve.engine.errors import InvalidRequest
from pdserve.gateway.dispatch_config import DispatchConfig
from pdserve.gateway.errors import AdmissionRefused
from pdserve.gateway.generation import GenerationRequest
from pdserve.gateway.node_view import NodeView

_NO_NODES_RETRY_S = 2.0
_DRAINING_RETRY_S = 5.0
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 120.0


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """What this gateway has to do; `mean_duration_s` is None until a request has finished."""

    num_inflight: int
    mean_duration_s: float | None
    is_draining: bool


def output_limit(request: GenerationRequest, views: tuple[NodeView, ...]) -> int:
    """Return the most tokens the output may have: what was asked for, else up to the limit of the nodes.

    Raises:
        AdmissionRefused: there is no node to ask.
        InvalidRequest: no decode node can ever hold the prompt and that many tokens.
    """
    ready = [view for view in views if view.is_ready]
    capacities = [view.info.num_blocks * view.info.block_size for view in ready if view.is_decode]
    if not capacities:
        raise AdmissionRefused("no_nodes", "no decode node is ready", _NO_NODES_RETRY_S)
    limit = min(max(capacities), min(view.info.max_model_len for view in ready))
    num_prompt = len(request.prompt_token_ids)
    if num_prompt + 1 > limit:
        raise InvalidRequest("prompt", f"{num_prompt} tokens; the context holds {limit} with the output")
    asked = request.sampling.max_tokens
    if asked is None:
        return limit - num_prompt
    if num_prompt + asked > limit:
        raise InvalidRequest("max_tokens", f"{asked} after a prompt of {num_prompt} tokens; the context holds {limit}")
    return asked


def admit(num_tokens: int, views: tuple[NodeView, ...], load: GatewayLoad, config: DispatchConfig) -> None:
    """Return if a prompt of `num_tokens` can be begun now.

    Raises:
        AdmissionRefused: with the time after which it probably can.
    """
    if load.is_draining:
        raise AdmissionRefused("draining", "this gateway is shutting down", _DRAINING_RETRY_S)
    if load.num_inflight >= config.max_inflight:
        # The next place is free when one of the requests in flight ends.
        retry_s = (load.mean_duration_s or 0.0) / config.max_inflight
        raise AdmissionRefused("server_overloaded", f"{load.num_inflight} requests are in flight", _clamp(retry_s))
    if any(view.num_waiting_tokens == 0 for view in _prefilling(views)):
        # To come again later would not be sooner, and only work can show that a node is no longer as slow as it was.
        return
    ttft_s = estimate_ttft_s(num_tokens, views)
    if ttft_s is not None and ttft_s > config.max_ttft_s:
        raise AdmissionRefused(
            "server_overloaded",
            f"the first token is {ttft_s:.0f} s away, more than {config.max_ttft_s:g} s",
            _clamp(ttft_s - config.max_ttft_s),
        )


def estimate_ttft_s(num_tokens: int, views: tuple[NodeView, ...]) -> float | None:
    """Estimate the time to a first token on the node that would have it first; None when one is unmeasured.

    Prefill nodes where there are any, decode nodes otherwise.
    """
    waits = [view.prefill_wait_s(num_tokens) for view in _prefilling(views)]
    known = [wait_s for wait_s in waits if wait_s is not None]
    return min(known) if known and len(known) == len(waits) else None


def _prefilling(views: tuple[NodeView, ...]) -> list[NodeView]:
    ready = [view for view in views if view.is_ready]
    return [view for view in ready if not view.is_decode] or ready


def _clamp(retry_s: float) -> float:
    return float(math.ceil(min(max(retry_s, _MIN_RETRY_S), _MAX_RETRY_S)))
