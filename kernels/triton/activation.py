"""activation(gate) * up, for gate and up side by side in a row."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-any-return,attr-defined"

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.activation import Activation

_TILE = 1024


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:  # [..., 2 * size] -> [..., size]
    """Compute as kernels.activation.gated_activation does, in float32."""
    size = gate_up.shape[-1] // 2
    output = gate_up.new_empty((*gate_up.shape[:-1], size))
    num_rows = gate_up.numel() // (2 * size)
    if num_rows:
        gate_row[(num_rows, triton.cdiv(size, _TILE))](
            gate_up.contiguous(), output, size, ACTIVATION=activation.value, TILE=_TILE, num_warps=4
        )
    return output


@triton.jit
def gate_row(gate_up, output, size, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """A tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = dims < size
    at = gate_up + row * 2 * size + dims
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        share = 1.0 / (1.0 + tl.exp(-tl.abs(gate)))  # sigmoid(|x|): nothing overflows
        active = gate * share * tl.where(gate < 0, tl.exp(-tl.abs(gate)), 1.0)
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        folded = tl.exp(-2.0 * tl.abs(inner))
        tangent = (1.0 - folded) / (1.0 + folded)
        active = 0.5 * gate * (1.0 + tl.where(inner < 0, -tangent, tangent))
    # The activation is rounded as a tensor of its own would be.
    active = active.to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * size + dims, (active * up).to(output.dtype.element_ty), mask=inside)
