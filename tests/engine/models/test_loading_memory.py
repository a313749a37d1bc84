"""Loading holds little more than the model: weights are mapped or copied layer by layer, never all of them twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

_CONFIG = {
    "model_type": "llama",
    "vocab_size": 6000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}

_CHILD = """
import sys
from pathlib import Path
import torch
from pdserve.engine.models.decoder_config import DecoderConfig
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.models.weights import WeightFiles, load_decoder_weights

def memory(name):  # not getrusage: its peak begins with that of the process that forked this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

torch.ones(8, 8) @ torch.ones(8, 8)
model_dir = ModelDir.open(Path(sys.argv[1]))
config = DecoderConfig.from_config(model_dir.config)
before = memory("VmRSS")
weights = load_decoder_weights(WeightFiles.open(model_dir.path), config, getattr(torch, sys.argv[2]))
loaded = [weights.embedding, weights.lm_head]
for layer in weights.layers:
    loaded += [layer.qkv.weight, layer.output.weight, layer.mlp.up.weight, layer.mlp.down.weight]
for tensor in loaded:
    tensor.view(-1)[::256].sum()  # mapped pages count once they are touched
print(memory("VmHWM") - before, sum(tensor.nbytes for tensor in loaded))
"""


@pytest.mark.parametrize(
    ("stored", "wanted"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_peak_memory_is_at_most_a_third_above_the_loaded_size(stored: str, wanted: str, tmp_path: Path) -> None:
    save_file(_tensors(getattr(torch, stored)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))

    child = subprocess.run([sys.executable, "-P", "-c", _CHILD, str(tmp_path), wanted], capture_output=True, text=True)

    assert child.returncode == 0, child.stderr
    peak, loaded = map(int, child.stdout.split())
    assert loaded > 100_000_000
    assert 0.9 * loaded < peak <= 1.3 * loaded


def _tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    hidden, inner, vocab = 1024, 2816, 6000
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for index in range(4):
        prefix = f"model.layers.{index}"
        shapes |= {f"{prefix}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"{prefix}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    return {f"{name}.weight": torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
