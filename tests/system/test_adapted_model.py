"""A model that runs through transformers' own code, served through the disaggregated path."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_PROMPT = [5, 9, 23, 42, 7, 7, 100, 3, 8, 11, 64, 23, 19, 77, 150, 8, 31, 4, 90, 12, 13, 14]


def test_gpt2_is_handed_over_and_its_prefix_is_kept(tiny_model: Any, start_cluster: Any) -> None:
    model_dir = tiny_model("gpt2", n_embd=64, n_head=4, n_layer=3, n_positions=512)
    cluster = start_cluster(model_dir, node_options=("--num-blocks", "64", "--block-size", "8"))

    first, second = _ask(cluster.url), _ask(cluster.url)

    expected = _reference(model_dir)
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"] == expected
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert cluster.status()["routes"]["disaggregated"] >= 2
    cluster.wait_idle()


def _ask(url: str) -> dict[str, Any]:
    body = {
        "model": "test",
        "prompt": _PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


def _reference(model_dir: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    generated = model.generate(
        torch.tensor([_PROMPT]),
        attention_mask=torch.ones(1, len(_PROMPT), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(generated[0, len(_PROMPT) :].tolist())
