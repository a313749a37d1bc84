"""Offline generation: one engine in this process, text in, text out."""

import random
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from pdserve.engine.bad_words import bad_words_ids
from pdserve.engine.beam_batch import run_beam_searches
from pdserve.engine.beam_output import BeamSearchOutput
from pdserve.engine.beam_search import BeamSearchParams
from pdserve.engine.chat_template import ChatMessage
from pdserve.engine.config import EngineConfig
from pdserve.engine.device import Place
from pdserve.engine.engine import Engine, ModelFacts, with_seed
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.model_source import resolve_model
from pdserve.engine.offline_batch import Interruption, Progress, run_prompts
from pdserve.engine.offline_prompt import Prompt, prompt_parts, split_tokens
from pdserve.engine.prompt_run import PromptRun, RequestOutput
from pdserve.engine.sampling_defaults import SamplingDefaults
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.score_output import ScoreOutput
from pdserve.engine.tokenizer import Tokenizer

_DTYPE_NAMES = {"half": "float16", "float": "float32"}


class LLM:
    """A model loaded into this process.

    `model` is a directory in Hugging Face format, a .gguf file, a hub id, or "demo". `generation_config="none"` leaves
    the sampling aside that the model recommends. On a CPU the pool of KV blocks has the size of `kv_memory_bytes`;
    `gpu_memory_utilization` and `enforce_eager` are for GPUs. `trust_remote_code` is taken for the sake of scripts that
    give it: no code of a model directory is ever run. With a `seed` the seeds of requests that name none are drawn from
    it. Further keyword arguments are those of `EngineConfig`; dtype "auto" is float32, on a GPU bfloat16.

    Raises:
        ModelError: the model cannot be found or served.
        InvalidRequest: an argument has a wrong value.
        TypeError: an unknown keyword argument.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        generation_config: str = "model",
        seed: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        if tensor_parallel_size != 1:
            raise InvalidRequest(
                "tensor_parallel_size", f"must be 1, got {tensor_parallel_size}: a model runs on one device for now"
            )
        if generation_config not in ("model", "none"):
            raise InvalidRequest("generation_config", f'must be "model" or "none", got {generation_config!r}')
        model_dir = resolve_model(str(model), progress=_say)
        config = _with_draft_model(EngineConfig(model_dir=model_dir, **_own_names(options)))
        self._max_num_seqs = config.max_num_seqs
        self._seeds = random.Random(seed)
        defaults = SamplingDefaults.load(model_dir) if generation_config == "model" else SamplingDefaults()
        self._default_sampling = SamplingParams(**defaults.values())
        with _progress_bar("Loading weights", unit="tensor") as on_progress:
            self._engine = Engine.load(config, on_progress)
        _check_length(config.max_model_len, self._engine.facts)
        self._tokenizer = Tokenizer.load(model_dir)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling that holds where none is given: the model's own recommendation."""
        return self._default_sampling

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text, token ids or `{"prompt": ...}`); one SamplingParams for all or one each.

        A prompt is computed once however many completions `n` and `best_of` ask for. Ctrl-C ends the call with what is
        there: prompts that were not finished have `finished` False; a second Ctrl-C raises KeyboardInterrupt.
        `use_tqdm` may be a class to take in place of tqdm. `priority`, one for all or one each, goes before that of the
        sampling; the least is served first with `scheduling_policy="priority"`.

        Raises:
            InvalidRequest: a prompt or its sampling can never be served; nothing was generated.
        """
        each = _as_list(prompts)
        sampling = sampling_params or self._default_sampling
        params = [sampling] * len(each) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(each):
            raise InvalidRequest("sampling_params", f"{len(params)} given for {len(each)} prompts")
        params = _with_priorities(params, priority)
        runs = [self._start(index, *wanted) for index, wanted in enumerate(zip(each, params, strict=True))]
        progress = Progress(len(runs), use_tqdm)
        try:
            with (
                Interruption.watched() as interruption,
                closing(run_prompts(self._engine, runs, interruption)) as ended,
            ):
                for each_ended in ended:
                    if each_ended.error is not None:
                        raise each_ended.error
                    progress.add(each_ended.run.num_prompt_tokens, each_ended.run.num_output_tokens)
        finally:
            progress.close()
        if interruption.is_asked:
            _say("interrupted: returning what is there")
        return [run.output() for run in runs]

    def generate_each(
        self,
        requests: Iterable[tuple[Prompt, SamplingParams] | InvalidRequest],
        *,
        interruption: Interruption | None = None,
        max_pending: int | None = None,
    ) -> Iterator[tuple[int, RequestOutput | InvalidRequest]]:
        """Yield the index and the output of each request as soon as it is finished, or why it cannot be served.

        `requests` is read no further ahead than `max_pending` unfinished ones (by default four times max_num_seqs), so
        that it may be longer than memory; one that is an error is yielded as it is. After an interruption nothing more
        is yielded.
        """
        refused: list[tuple[int, InvalidRequest]] = []
        index_of: dict[str, int] = {}

        def runs() -> Iterator[PromptRun]:
            for index, request in enumerate(requests):
                try:
                    if isinstance(request, InvalidRequest):
                        raise request
                    run = self._start(index, *request)
                except InvalidRequest as error:
                    refused.append((index, error))
                    continue
                index_of[run.request_id] = index
                yield run

        limit = max_pending or 4 * self._max_num_seqs
        with closing(run_prompts(self._engine, runs(), interruption or Interruption(), limit)) as all_ended:
            for ended in all_ended:
                yield from refused
                refused.clear()
                yield index_of.pop(ended.run.request_id), ended.error or ended.run.output()
        yield from refused

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        Raises:
            InvalidRequest: as `generate`.
        """
        if not messages:
            raise InvalidRequest("messages", "must not be empty")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_token_ids(each, add_generation_prompt) for each in conversations]  # type: ignore[arg-type]  # narrowed by its first item
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """Return the best sequences after each prompt, as transformers' beam search finds them; best first.

        Raises:
            InvalidRequest: a prompt and its beams do not fit; nothing was searched.
        """
        each = [prompt_parts(prompt) for prompt in _as_list(prompts)]
        token_ids = [tuple(self._tokenizer.encode(text or "") if given is None else given) for text, given in each]
        found: dict[int, BeamSearchOutput] = {}
        progress_class = tqdm if isinstance(use_tqdm, bool) else use_tqdm
        with (
            progress_class(total=len(each), desc="Beam searches", unit="prompt", disable=use_tqdm is False) as bar,
            closing(run_beam_searches(self._engine, token_ids, params, self._max_num_seqs)) as searches,
        ):
            for index, hypotheses in searches:
                found[index] = BeamSearchOutput.of(token_ids[index], hypotheses, self._tokenizer)
                bar.update()
        return [found[index] for index in range(len(each))]

    def chat_token_ids(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        """Return the tokens of a conversation in the model's chat template."""
        text = self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[ScoreOutput]:
        """Return how likely each continuation is after its prompt; one prompt may have several continuations.

        Texts are tokenized together, so that a continuation begins where the tokens of its prompt end.

        Raises:
            InvalidRequest: the numbers do not match, a continuation is empty, or the two do not fit the context.
        """
        firsts, seconds = _as_list(prompts), _as_list(continuations)
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            raise InvalidRequest("continuations", f"{len(seconds)} given for {len(firsts)} prompts")
        pairs = [split_tokens(first, second, self._tokenizer) for first, second in zip(firsts, seconds, strict=True)]
        scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
        outputs = self.generate([before + after for before, after in pairs], scoring, use_tqdm=use_tqdm)
        return [
            ScoreOutput.of(output, len(before))
            for output, (before, _) in zip(outputs, pairs, strict=True)
            if output.finished
        ]

    def _start(self, index: int, prompt: Prompt, sampling: SamplingParams) -> PromptRun:
        text, given = prompt_parts(prompt)
        token_ids = tuple(self._tokenizer.encode(text or "") if given is None else given)
        seeded = with_seed(sampling, self._seeds.getrandbits(63))
        if seeded.bad_words:
            spelled = bad_words_ids(seeded.bad_words, self._tokenizer)
            seeded = replace(seeded, bad_words=(), bad_words_ids=(*seeded.bad_words_ids, *spelled))
        run = PromptRun.start(f"{index}-{secrets.token_hex(4)}", text, token_ids, seeded, self._tokenizer)
        for branch in run.branches:
            self._engine.check(branch.spec)
        return run


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[int(item) for item in prompts if isinstance(item, int)]]
    each: list[Prompt] = []
    for item in prompts:
        if isinstance(item, int):
            raise InvalidRequest("prompt", "token ids stand beside other prompts: put them into a list of their own")
        each.append(item)
    return each


def _with_priorities(params: list[SamplingParams], priority: int | Sequence[int] | None) -> list[SamplingParams]:
    if priority is None:
        return params
    priorities = [priority] * len(params) if isinstance(priority, int) else list(priority)
    if len(priorities) != len(params):
        raise InvalidRequest("priority", f"{len(priorities)} given for {len(params)} prompts")
    return [replace(each, priority=value) for each, value in zip(params, priorities, strict=True)]


def _own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under our names where scripts for vLLM use another."""
    named = {"enable_prefix_cache" if name == "enable_prefix_caching" else name: options[name] for name in options}
    if "dtype" in named:  # may be torch's own
        dtype = str(named.pop("dtype")).removeprefix("torch.")
        is_default = dtype == "auto" and not Place.of(str(named.get("device", "auto"))).is_gpu
        named |= {} if is_default else {"dtype": _DTYPE_NAMES.get(dtype, dtype)}
    return named


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


def _with_draft_model(config: EngineConfig) -> EngineConfig:
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return config
    draft_dir = str(resolve_model(speculative.model, progress=_say))
    return replace(config, speculative_config=replace(speculative, model=draft_dir))


def _check_length(max_model_len: int | None, facts: ModelFacts) -> None:
    if max_model_len is not None and facts.max_model_len < max_model_len:
        raise InvalidRequest(
            "max_model_len",
            f"{max_model_len} tokens are more than the {facts.max_model_len} for which the model's context and the KV "
            "blocks have room; give less, or more kv_memory_bytes or num_blocks",
        )


@contextmanager
def _progress_bar(description: str, unit: str) -> Iterator[Any]:
    with tqdm(desc=description, unit=unit, dynamic_ncols=True, leave=False) as bar:

        def on_progress(num_done: int, num_total: int) -> None:
            bar.total = num_total
            bar.update(num_done - bar.n)

        yield on_progress
