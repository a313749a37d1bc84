"""The same task on the running system and on transformers, judged by lm_eval: each loglikelihood to 1e-3.

    compare.py http://127.0.0.1:8000 MODEL_DIR

Asks the system through `local-completions` (echo and logprobs), transformers in this process. Exit code 1: they
differ.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOLERANCE = 1e-3
TASK = "pdserve_facts"


def main() -> int:
    """Run the task twice and print the comparison as a Markdown table."""
    url, model_dir = sys.argv[1].rstrip("/"), str(Path(sys.argv[2]).resolve())
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # beside a running system, threads that wait for each other cost most
    os.chdir(HERE)  # the task names its data file relative to itself
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as reply:
        name = json.loads(reply.read())["data"][0]["id"]
    served = evaluate(
        "local-completions",
        {
            "model": name,
            "base_url": f"{url}/v1/completions",
            "tokenizer": model_dir,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
            "max_retries": 1,
        },
    )
    reference = evaluate("hf", {"pretrained": model_dir, "dtype": "float32", "device": "cpu"})
    return report(served, reference)


def evaluate(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return lm_eval's results, samples included."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(HERE), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[TASK], task_manager=manager, log_samples=True, batch_size=1
    )
    return dict(results or {})


def report(served: dict[str, Any], reference: dict[str, Any]) -> int:
    """Print what both say; return 1 if a number differs by more than the tolerance, or a choice."""
    ours, theirs = (loglikelihoods(results) for results in (served, reference))
    if ours.keys() != theirs.keys() or not ours:
        print(f"not the same questions: {len(ours)} and {len(theirs)}")
        return 1
    worst = max(abs(ours[key][0] - theirs[key][0]) for key in ours)
    num_greedy = sum(ours[key][1] != theirs[key][1] for key in ours)
    print("| | pdserve | transformers |\n|---|---|---|")
    metrics = [name for name in served["results"][TASK] if name.startswith("acc") and "stderr" not in name]
    for name in metrics:
        print(
            f"| {name.split(',')[0]} | {served['results'][TASK][name]:.4f} | {reference['results'][TASK][name]:.4f} |"
        )
    totals = [sum(value for value, _ in each.values()) for each in (ours, theirs)]
    print(f"| sum of {len(ours)} loglikelihoods | {totals[0]:.4f} | {totals[1]:.4f} |")
    print(
        f"\nlargest difference of a loglikelihood: {worst:.2e} (at most {TOLERANCE:g}); is_greedy differs: {num_greedy}"
    )
    is_same = all(served["results"][TASK][name] == reference["results"][TASK][name] for name in metrics)
    return 0 if is_same and worst <= TOLERANCE and num_greedy == 0 else 1


def loglikelihoods(results: dict[str, Any]) -> dict[tuple[int, int], tuple[float, bool]]:
    """Return (loglikelihood, is_greedy) by question and choice."""
    found = {}
    for sample in results["samples"][TASK]:
        for choice, response in enumerate(sample["filtered_resps"]):
            found[(sample["doc_id"], choice)] = (float(response[0]), str(response[1]) == "True")
    return found


if __name__ == "__main__":
    sys.exit(main())
