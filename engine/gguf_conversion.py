"""Turns one GGUF file into a Hugging Face directory; runs as a child process, for it needs torch.

The parent (`model_source.py`) decides where and when; this module reads argv and prints one line per stage.
"""

import sys
from pathlib import Path


def convert(gguf_path: Path, output_dir: Path) -> None:
    """Write config, float32 safetensors, tokenizer, chat template and generation config to `output_dir`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("reading the GGUF weights", flush=True)
    source = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    print("building the tokenizer", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers marks the loaded model as quantized and then refuses to save it: a twin that was never
    # quantized takes over its weights.
    config_fields = loaded.config.to_dict()
    config_fields.pop("quantization_config", None)
    config = type(loaded.config).from_dict(config_fields)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    print("writing config, weights and tokenizer", flush=True)
    plain.save_pretrained(output_dir, max_shard_size="4GB")
    tokenizer.save_pretrained(output_dir)


def main() -> None:
    """Convert argv[1] into the directory argv[2]."""
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
