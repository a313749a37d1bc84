"""Requests in the shape of `vllm bench serve`, for both of its OpenAI backends.

check.py URL MODEL: every request must end with the tokens it asked for, and its usage must say so.
"""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

_NUM_REQUESTS = 24
_CONCURRENCY = 6
_OUTPUT_TOKENS = 12


def _body(model: str, number: int) -> tuple[str, dict[str, object]]:
    prompt = f"Request {number}: " + "the quick brown fox jumps over the lazy dog " * 4
    shared = {
        "model": model,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if number % 2:
        content = [{"type": "text", "text": prompt}]
        messages = [{"role": "user", "content": content}]
        return "/v1/chat/completions", {**shared, "messages": messages, "max_completion_tokens": _OUTPUT_TOKENS}
    fields = {"prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "logprobs": None, "repetition_penalty": 1.0}
    return "/v1/completions", {**shared, **fields}


def _ask(url: str, model: str, number: int) -> int:
    path, body = _body(model, number)
    headers = {"Content-Type": "application/json", "x-request-id": f"bench-{number}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    num_tokens = 0
    with urllib.request.urlopen(request, timeout=300) as reply:
        for line in reply:
            chunk = line.decode().strip().removeprefix("data: ")
            if not chunk or chunk.startswith(":") or chunk == "[DONE]":
                continue
            if usage := json.loads(chunk).get("usage"):
                num_tokens = usage["completion_tokens"]
    return num_tokens


def main() -> None:
    """Send all and check each."""
    url, model = sys.argv[1:]
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        counts = list(pool.map(lambda number: _ask(url, model, number), range(_NUM_REQUESTS)))
    assert counts == [_OUTPUT_TOKENS] * _NUM_REQUESTS, counts
    print(f"vllm bench serve's requests: {_NUM_REQUESTS} answered with {_OUTPUT_TOKENS} tokens each")


if __name__ == "__main__":
    main()
