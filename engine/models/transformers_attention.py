"""Paged attention as one of transformers' attention implementations: its models compute all the rest.

A model with the attention implementation `ATTENTION_NAME` calls `_attend` in each layer with the queries, keys and
values of this step's tokens, flattened over sequences. What belongs to the step is found through the layer itself, in
the slot that `StepSlot.attach` has put there: some models do not hand keyword arguments down.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.errors import ModelError
from pdserve.engine.kv_cache import KVCache
from pdserve.kernels.operations import Operations

ATTENTION_NAME = "pdserve_paged"
_SLOT = "pdserve_step_slot"
_UNKNOWN_TO_US = ("s_aux", "position_bias", "head_mask", "alibi", "indices")


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer asks for: tensors of shape [num_tokens, heads, head_dim], and how to attend."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    soft_cap: float | None


class AttentionStep(Protocol):
    """One run of the model: where its layers' keys and values go, and who attends."""

    def attend(self, call: LayerCall) -> Tensor:  # [num_tokens, num_heads, head_dim]
        ...


class StepSlot:
    """Where the layers of one model find the step that is being run; empty between steps."""

    def __init__(self) -> None:
        self._step: AttentionStep | None = None

    def attach(self, model: Any) -> None:
        """Give the slot to every layer of the model."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _SLOT, self)

    @contextmanager
    def filled(self, step: AttentionStep) -> Iterator[None]:
        """Hold `step` while the model runs."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    @property
    def step(self) -> AttentionStep:
        """The step being run."""
        assert self._step is not None, "a layer attends outside a step"
        return self._step


class PagedStep:
    """A step over the paged cache: stores the new keys and values in their slots, attends over the block tables."""

    def __init__(
        self,
        operations: Operations,
        kv_cache: KVCache,
        slot_mapping: Tensor,
        spans: Any,
        before_layer: Callable[[int], None],
    ) -> None:
        self._operations = operations
        self._kv_cache = kv_cache
        self._slot_mapping = slot_mapping
        self._spans = spans
        self._before_layer = before_layer

    def attend(self, call: LayerCall) -> Tensor:
        """Raises what `before_layer` raises, if nobody wants the result any more."""
        self._before_layer(call.layer)
        blocks = self._kv_cache.layer(call.layer)
        heads = torch.cat((call.query, call.key, call.value), dim=1)
        query = self._operations.rope_store(heads, None, blocks, self._slot_mapping)
        return self._operations.attention(query, blocks, self._spans, call.scale, call.window, call.soft_cap)


class RecordingStep:
    """A step without a cache, over one prompt: learns what each layer asks for. Used once, at the start."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> Tensor:
        self.calls.append(call)
        group = call.query.shape[1] // call.key.shape[1]
        query, key, value = (part.transpose(0, 1) for part in (call.query, call.key, call.value))
        key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
        scores = (query @ key.transpose(1, 2)).float() * call.scale
        if call.soft_cap is not None:
            scores = torch.tanh(scores / call.soft_cap) * call.soft_cap
        num_tokens = query.shape[1]
        seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        if call.window is not None:
            seen = seen.triu(1 - call.window)
        weights = F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).to(value.dtype)
        return (weights @ value).transpose(0, 1)


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers. No mask is registered with it: models then build none."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: Any,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # [1, num_tokens, num_heads, head_dim]
    slot: StepSlot = getattr(module, _SLOT)
    asked = [name for name in _UNKNOWN_TO_US if others.get(name) is not None]
    if asked or attention_mask is not None:
        raise ModelError(f"its attention needs {', '.join(asked) or 'a mask of its own'}")
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ModelError("its attention is not causal")
    if query.shape[0] != 1 or value.shape != key.shape or query.shape[-1] != key.shape[-1]:
        raise ModelError("its keys and values differ in shape")
    call = LayerCall(
        layer=int(module.layer_idx),
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        soft_cap=softcap,
    )
    return slot.step.attend(call).unsqueeze(0), None
