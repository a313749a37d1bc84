"""transformers' continuous batching behind HTTP: requests join and leave the running batch; float32, greedy.

python continuous_batch_server.py MODEL_DIR '{"threads": 2, "batch": 16, "step_tokens": 512}'
"""

import asyncio
import itertools
import json
import sys
import threading

import torch
from peer_http import Waiting, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

_PAGE_TOKENS = 32
_CACHE_TOKENS = 32_768
_POLL_S = 1.0


class Requests:
    """Gives requests to the manager and its tokens back to them."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self._manager = manager
        self._names = (f"request-{number}" for number in itertools.count())
        self._open: dict[str, tuple[Waiting, int]] = {}

    def accept(self, one: Waiting) -> None:
        """Queue a request."""
        name = next(self._names)
        self._open[name] = (one, 0)
        self._manager.add_request(one.prompt, request_id=name, max_new_tokens=one.num_output, streaming=True)

    def deliver(self) -> None:
        """Hand tokens over for ever."""
        while self._manager.is_running():
            output = self._manager.get_result(timeout=_POLL_S)
            if output is None or output.request_id not in self._open:
                continue
            one, num_sent = self._open[output.request_id]
            for token_id in output.generated_tokens[num_sent:]:
                one.put(token_id)
            self._open[output.request_id] = (one, len(output.generated_tokens))
            if output.is_finished():
                one.put(None)
            if one.has_left and not output.is_finished():
                self._manager.cancel_request(output.request_id)
            if one.has_left or output.is_finished():
                del self._open[output.request_id]


def main() -> None:
    """Serve the model argv[1] with the settings of argv[2]."""
    settings = json.loads(sys.argv[2])
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa")
    manager = model.init_continuous_batching(
        # No token has the id -1: answers have their full length.
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=_CACHE_TOKENS // _PAGE_TOKENS,
            max_batch_tokens=settings["step_tokens"],
            max_requests_per_batch=settings["batch"],
            use_async_batching=False,
            use_cuda_graph=False,
        ),
    )
    manager.start()
    requests = Requests(manager)
    threading.Thread(target=requests.deliver, name="deliver", daemon=True).start()
    asyncio.run(serve(requests.accept))


if __name__ == "__main__":
    main()
