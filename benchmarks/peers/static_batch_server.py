"""Libraries that compute one batch to its end: what waits is computed together, its tokens streamed as they come.

    python static_batch_server.py MODEL_DIR '{"backend": "transformers", "type": "float32", "threads": 2, "batch": 16}'

Backends: transformers (`generate`) and ctranslate2. A batch is made of requests that wait at the same time and have
the same lengths. Greedy, always of full length.
"""

import asyncio
import json
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from peer_http import Waiting, serve

# How long the first of a batch waits for others: long against the spread of one burst, short against a prefill.
_GATHER_S = 0.05

Emit = Callable[[Sequence[int]], None]
Generate = Callable[[Sequence[Sequence[int]], int, Emit], None]


def transformers_backend(model_dir: Path, settings: dict[str, object]) -> Generate:
    """Return `generate` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(int(str(settings["threads"])))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, str(settings["type"])))

    class Steps(BaseStreamer):
        def __init__(self, emit: Emit) -> None:
            self._emit, self._is_prompt = emit, True

        def put(self, value: "torch.Tensor") -> None:
            if not self._is_prompt:
                self._emit(value.flatten().tolist())
            self._is_prompt = False

        def end(self) -> None:
            pass  # the lengths say it

    def generate(prompts: Sequence[Sequence[int]], num_output: int, emit: Emit) -> None:
        input_ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                min_new_tokens=num_output,
                max_new_tokens=num_output,
                pad_token_id=0,
                streamer=Steps(emit),
            )

    return generate


def ctranslate2_backend(model_dir: Path, settings: dict[str, object]) -> Generate:
    """Return `generate_batch` of ctranslate2; the model is converted once, beside ours."""
    import ctranslate2
    from transformers import AutoTokenizer

    kind = str(settings["type"])
    converted = model_dir.with_name(f"{model_dir.name}-ct2-{kind}")
    if not converted.exists():
        made = converted.with_suffix(".part")
        ctranslate2.converters.TransformersConverter(str(model_dir)).convert(str(made), quantization=kind, force=True)
        made.rename(converted)
    generator = ctranslate2.Generator(str(converted), compute_type=kind, intra_threads=int(str(settings["threads"])))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def generate(prompts: Sequence[Sequence[int]], num_output: int, emit: Emit) -> None:
        step: dict[int, int] = {}

        def on_token(result: "ctranslate2.GenerationStepResult") -> bool:
            step[result.batch_id] = result.token_id
            if len(step) == len(prompts):
                emit([step[index] for index in range(len(prompts))])
                step.clear()
            return False

        generator.generate_batch(
            [tokenizer.convert_ids_to_tokens(list(prompt)) for prompt in prompts],
            max_length=num_output,
            min_length=num_output,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=on_token,
        )

    return generate


def compute(waiting: "queue.Queue[Waiting]", generate: Generate, max_batch: int) -> None:
    """Run batches for ever: the thread in which the library computes."""
    kept: list[Waiting] = []
    while True:
        batch = [kept.pop(0) if kept else waiting.get()]
        while len(batch) + len(kept) < max_batch:
            try:
                other = waiting.get(timeout=_GATHER_S)
            except queue.Empty:
                break
            kept.append(other)
        alike = [other for other in kept if _lengths(other) == _lengths(batch[0])][: max_batch - 1]
        batch += alike
        kept = [other for other in kept if other not in alike]
        batch = [one for one in batch if not one.has_left]
        if not batch:
            continue

        def emit(token_ids: Sequence[int], batch: list[Waiting] = batch) -> None:
            for one, token_id in zip(batch, token_ids, strict=True):
                one.put(token_id)

        generate([one.prompt for one in batch], batch[0].num_output, emit)
        for one in batch:
            one.put(None)


def _lengths(one: Waiting) -> tuple[int, int]:
    return len(one.prompt), one.num_output


def main() -> None:
    """Serve the model argv[1] with the settings of argv[2]."""
    settings = json.loads(sys.argv[2])
    backend = {"transformers": transformers_backend, "ctranslate2": ctranslate2_backend}[settings["backend"]]
    waiting: queue.Queue[Waiting] = queue.Queue()
    arguments = (waiting, backend(Path(sys.argv[1]), settings), int(settings["batch"]))
    threading.Thread(target=compute, args=arguments, name="compute", daemon=True).start()
    asyncio.run(serve(waiting.put))


if __name__ == "__main__":
    main()
