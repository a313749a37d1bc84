"""What differs from layer to layer: how far it looks back, which rotation it uses, whether it has experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.engine.errors import ModelError
from pdserve.engine.models.architectures import Architecture, Window

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. `window` counts the token itself and those before it that it sees; None is all of them."""

    window: int | None
    rope: int | None  # index into the config's rotations; None: positions are not encoded
    has_experts: bool


def layer_shapes(fields: Mapping[str, Any], architecture: Architecture) -> tuple[LayerShape, ...]:
    """Read the pattern of all layers.

    Raises:
        ModelError: a listed layer type is unknown, or a list is shorter than the model.
    """
    num_layers = int(fields["num_hidden_layers"])
    is_rotated = _rotated(fields, architecture, num_layers)
    slides = _sliding(fields, architecture, is_rotated)
    has_experts = _with_experts(fields, architecture, num_layers)
    window = fields.get("sliding_window")
    return tuple(
        LayerShape(
            window=int(window) if slides[index] and window else None,
            rope=(int(slides[index]) if architecture.rope_by_layer_type else 0) if is_rotated[index] else None,
            has_experts=has_experts[index],
        )
        for index in range(num_layers)
    )


def _sliding(fields: Mapping[str, Any], architecture: Architecture, is_rotated: list[bool]) -> list[bool]:
    num_layers = len(is_rotated)
    is_on = architecture.window_switch is None or bool(fields.get(architecture.window_switch))
    listed = fields.get("layer_types") if architecture.lists_layer_types else None
    if listed is not None:
        _check_layer_types(listed, num_layers)
        return [is_on and kind == SLIDING_ATTENTION for kind in listed[:num_layers]]
    if not is_on:
        return [False] * num_layers
    return [_slides(fields, architecture.window, index, is_rotated[index]) for index in range(num_layers)]


def _slides(fields: Mapping[str, Any], window: Window, index: int, is_rotated: bool) -> bool:
    match window:
        case Window.NONE:
            return False
        case Window.EVERY_LAYER:
            return True
        case Window.EVERY_OTHER:
            return index % 2 == 0
        case Window.FROM_LAYER:
            return index >= int(fields["max_window_layers"])
        case Window.EVERY_OTHER_BELOW:
            return index % 2 == 0 and index < int(fields["max_window_layers"])
        case Window.ALL_BUT_NTH:
            return (index + 1) % int(fields["sliding_window_pattern"]) != 0
        case Window.UNROTATED:
            return not is_rotated


def _check_layer_types(listed: list[str], num_layers: int) -> None:
    unknown = set(listed) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if unknown:
        raise ModelError(f"layer_types has {sorted(unknown)[0]!r}; supported: {FULL_ATTENTION}, {SLIDING_ATTENTION}")
    if len(listed) < num_layers:
        raise ModelError(f"layer_types lists {len(listed)} layers, num_hidden_layers is {num_layers}")


def _rotated(fields: Mapping[str, Any], architecture: Architecture, num_layers: int) -> list[bool]:
    if not architecture.has_unrotated_layers:
        return [True] * num_layers
    listed = fields.get("no_rope_layers")  # 1 where the layer is rotated, despite the name
    if listed is None:
        interval = int(fields["no_rope_layer_interval"])
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(listed) < num_layers:
        raise ModelError(f"no_rope_layers lists {len(listed)} layers, num_hidden_layers is {num_layers}")
    return [bool(flag) for flag in listed[:num_layers]]


def _with_experts(fields: Mapping[str, Any], architecture: Architecture, num_layers: int) -> list[bool]:
    if architecture.experts is None:
        return [False] * num_layers
    dense = set(fields.get("mlp_only_layers") or [])
    step = int(fields.get("decoder_sparse_step") or 1)
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]
