"""Nodes on unlike processors: every build of the kernels that fuses multiply and add gives the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ASK = """
import sys
from pdserve import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype=sys.argv[2], kv_cache_dtype=sys.argv[3], num_blocks=64)
prompts = ["The capital of France is", "river stone cloud engine paper window garden " * 30]
outputs = llm.generate(prompts, SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=2, ignore_eos=True))
print([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
"""


def _answers(model_dir: Path, dtype: str, kv_dtype: str, capability: str) -> str:
    command = (sys.executable, "-c", _ASK, str(model_dir), dtype, kv_dtype)
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="has no second build that fuses")
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("int8", "bfloat16"), ("int8", "int8"), ("float32", "float32")])
def test_a_model_has_the_same_bits_on_either(demo_model_dir: Path, dtype: str, kv_dtype: str) -> None:
    answers = _answers(demo_model_dir, dtype, kv_dtype, "avx512")

    assert answers.count("logprob=") == 2 * 8
    assert _answers(demo_model_dir, dtype, kv_dtype, "avx2") == answers
