"""A decode node that speculates behind a real gateway: the same answers, and the counts where operators look."""

import json
import urllib.request
from typing import Any

import pytest

from pdserve import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
_NODE_OPTIONS = ("--num-blocks", "64", "--block-size", "8")
_PROMPT = [50, 51, 52, 53] * 5
_SAMPLING: dict[str, Any] = {"max_tokens": 30, "temperature": 0.7, "seed": 9, "ignore_eos": True}
_ALLOWED = [50, 51, 52, 53]


def test_drafts_are_verified_counted_and_forgone_where_a_request_says_so(tiny_model: Any, start_cluster: Any) -> None:
    model_dir = tiny_model()
    cluster = start_cluster(
        model_dir, prefill=0, node_options=(*_NODE_OPTIONS, "--speculative-config", json.dumps(_SPECULATIVE))
    )
    cluster.node_options = _NODE_OPTIONS  # prefill nodes do not speculate
    cluster.start_node("prefill", 0)
    cluster.wait_for_nodes(2)

    plain = _ask(cluster.url, speculative=False)
    drafted_for_nobody = _speculation(cluster)
    answers = [_ask(cluster.url) for _ in range(2)]

    expected = LLM(model_dir, block_size=8, num_blocks=64).generate(
        [_PROMPT], SamplingParams(allowed_token_ids=tuple(_ALLOWED), **_SAMPLING), use_tqdm=False
    )
    assert plain == list(expected[0].outputs[0].token_ids)
    assert answers == [plain] * 2
    assert drafted_for_nobody["drafted"] == 0
    cluster.wait_until(lambda: _speculation(cluster)["accepted"] > 0, "the node's word of what it has drafted")
    counts = _speculation(cluster)
    assert counts["method"] == "ngram" and counts["acceptance_rate"] == counts["accepted"] / counts["drafted"]
    assert 'vllm:spec_decode_num_accepted_tokens_total{method="ngram",node_id="' in _metrics(cluster.url)
    cluster.wait_idle()


def _speculation(cluster: Any) -> dict[str, Any]:
    """What the decode node says; the prefill node says nothing."""
    by_role = {node["role"]: node["speculation"] for node in cluster.status()["nodes"]}
    assert by_role["prefill"] is None
    counts: dict[str, Any] = by_role["decode"]
    return counts


def _ask(url: str, **options: Any) -> list[int]:
    body = {
        "model": "test",
        "prompt": _PROMPT,
        "return_token_ids": True,
        "allowed_token_ids": _ALLOWED,
        **_SAMPLING,
        **options,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        token_ids: list[int] = json.loads(reply.read())["choices"][0]["token_ids"]
    return token_ids


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        return str(reply.read().decode())
