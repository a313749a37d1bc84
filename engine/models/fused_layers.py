"""Which layers of a decoder can run in one call: those of the plain pre-norm shape that llama has."""

from pdserve.engine.models.architectures import HeadNorm
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.layer_pattern import LayerShape
from pdserve.engine.models.layer_weights import LayerWeights, LinearWeights, MlpWeights
from pdserve.kernels.fused_layer import FusedLayer, GatedLayer, Projection
from pdserve.kernels.operations import Operations


def fuse_layer(
    config: DecoderConfig, shape: LayerShape, layer: LayerWeights, operations: Operations
) -> FusedLayer | None:
    """Return the layer for `Operations.run_layers`; None if it is of another shape, or the operations fuse nothing."""
    before, between, mlp = layer.attention_input_norm, layer.mlp_input_norm, layer.mlp
    is_plain = (
        config.head_norm is HeadNorm.NONE
        and config.activation == "silu"
        and config.architecture.mlp_names.gated
        and not config.is_parallel
        and layer.attention_output_norm is None
        and layer.mlp_output_norm is None
    )
    if not is_plain or before is None or between is None or not isinstance(mlp, MlpWeights):
        return None
    if before.bias is not None or between.bias is not None:
        return None
    return operations.fuse(
        GatedLayer(
            input_norm=before.weight,
            mlp_norm=between.weight,
            qkv=_projection(layer.qkv),
            output=_projection(layer.output),
            up=_projection(mlp.up),
            down=_projection(mlp.down),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=shape.window,
            eps=config.norm_eps,
            scale=config.multipliers.attention,
            soft_cap=config.multipliers.attention_soft_cap,
            residual=config.multipliers.residual,
        )
    )


def _projection(linear: LinearWeights) -> Projection:
    return Projection(linear.weight, linear.bias)
