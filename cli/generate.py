"""`pdserve generate`: prompts in, completions out, with one engine in this process."""

import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli.device_check import check_device
from pdserve.cli.errors import SettingError
from pdserve.cli.processes import engine_config
from pdserve.cli.prompt_file import AnswerFile, PromptLine, read_prompts, sampling_of
from pdserve.cli.settings import Settings
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pdserve.engine.llm import LLM
    from pdserve.engine.offline_prompt import Prompt
    from pdserve.engine.prompt_run import RequestOutput
    from pdserve.engine.step_output import SampledToken, TokenScore

_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def generate(settings: Settings, prompts: Sequence[str], *, progress: Callable[[str], None]) -> int:
    """Complete prompts, to standard output or from file to file; return the exit code.

    Raises:
        SettingError: there is no prompt, or a file cannot be read or written.
    """
    if settings.input is not None or settings.output is not None:
        return _generate_file(settings, prompts, progress)
    wanted = list(prompts) or ([] if sys.stdin.isatty() else [line.rstrip("\n") for line in sys.stdin])
    if not wanted:
        raise SettingError('no prompt: give one as `pdserve generate "..."`, or lines on standard input')
    sampling = SamplingParams(**_sampling(settings))
    llm = _load(settings, progress)
    inputs = [_prompt(llm, settings, {"prompt": prompt}) for prompt in wanted]
    outputs = llm.generate(inputs, sampling, use_tqdm=len(wanted) > 1)
    for prompt, output in zip(wanted, outputs, strict=True):
        if len(wanted) > 1:
            print(f"\n>>> {prompt}")
        print(output.outputs[0].text)
    return 0 if all(output.finished for output in outputs) else 128 + signal.SIGINT


def _generate_file(settings: Settings, prompts: Sequence[str], progress: Callable[[str], None]) -> int:
    if settings.input is None or settings.output is None or prompts:
        raise SettingError("--input and --output go together, and without prompts on the command line")
    path, default = Path(settings.input), _sampling(settings)
    SamplingParams(**default)
    try:
        lines = list(read_prompts(path))
        opened = AnswerFile.open(Path(settings.output))
        with opened as answers:
            todo = [line for line in lines if not answers.has(line)]
            progress(f"{path}: {len(lines) - len(todo)} of {len(lines)} lines are answered, {len(todo)} to do")
            num_done = _answer(settings, todo, answers, progress) if todo else 0
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--input, --output: {error}") from None
    if num_done < len(todo):
        progress(f"interrupted with {len(todo) - num_done} lines to do; the same command goes on")
        return 128 + signal.SIGINT
    return 0


def _answer(
    settings: Settings, todo: Sequence[PromptLine], answers: AnswerFile, progress: Callable[[str], None]
) -> int:
    """Answer the lines, each written as soon as it is finished; return how many were."""
    default, num_done = _sampling(settings), 0
    names: dict[int, dict[str, Any]] = {}
    llm = _load(settings, progress)
    from pdserve.engine.offline_batch import Interruption, Progress

    def requests() -> Iterator[tuple["Prompt", SamplingParams] | InvalidRequest]:
        for index, line in enumerate(todo):
            try:
                fields = line.fields()
                names[index] = {name: fields[name] for name in ("id", "custom_id") if name in fields}
                yield _prompt(llm, settings, fields), sampling_of(fields, default)
            except InvalidRequest as error:
                yield error

    bar = Progress(len(todo), use_tqdm=True)
    with Interruption.watched() as interruption:
        for index, output in llm.generate_each(requests(), interruption=interruption):
            entry = _entry(output)
            answers.add(todo[index], {**names.pop(index, {}), **entry})
            num_done += 1
            usage = entry.get("usage", {"prompt_tokens": 0, "completion_tokens": 0})
            bar.add(usage["prompt_tokens"], usage["completion_tokens"])
    bar.close()
    return num_done


def _entry(output: "RequestOutput | InvalidRequest") -> dict[str, Any]:
    if isinstance(output, InvalidRequest):
        return {"error": {"field": output.field, "message": output.message}}
    choices = []
    for each in output.outputs:
        choice: dict[str, Any] = {"index": each.index, "text": each.text, "finish_reason": each.finish_reason}
        if each.stop_reason is not None:
            choice["stop_reason"] = each.stop_reason
        if each.logprobs is not None:
            choice["logprobs"] = [{"token_id": token.token_id, **_likelihood(token)} for token in each.logprobs]
        choices.append(choice)
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(each.token_ids) for each in output.outputs),
        "cached_tokens": output.num_cached_tokens,
    }
    entry: dict[str, Any] = {"outputs": choices, "usage": usage}
    if output.prompt_logprobs is not None:
        entry["prompt_logprobs"] = [None if score is None else _likelihood(score) for score in output.prompt_logprobs]
    return entry


def _likelihood(token: "SampledToken | TokenScore") -> dict[str, Any]:
    return {"logprob": token.logprob, "top_logprobs": list(token.top_logprobs)}


def _sampling(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in _SAMPLING}


def _load(settings: Settings, progress: Callable[[str], None]) -> "LLM":
    check_device(settings.device)
    config = engine_config(settings, progress)
    from pdserve.engine.llm import LLM

    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return LLM(options.pop("model_dir"), **options)


def _prompt(llm: "LLM", settings: Settings, fields: Mapping[str, Any]) -> "Prompt":
    """Return what a line or an argument asks, a text put through the chat template unless --no-chat."""
    messages, text = fields.get("messages"), fields.get("prompt")
    if messages is not None:
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise InvalidRequest("messages", "must be a list of objects with role and content")
        return llm.chat_token_ids(messages)
    if isinstance(text, str) and settings.chat and llm.tokenizer.chat_template is not None:
        return llm.chat_token_ids([{"role": "user", "content": text}])
    return {name: fields[name] for name in ("prompt", "prompt_token_ids") if name in fields}
