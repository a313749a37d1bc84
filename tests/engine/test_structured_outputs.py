"""Structured answers on a tiny model with a tokenizer of bytes and a few merges: the neighbour law, ends, failures."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine
from pdserve.engine.errors import GrammarFailed, InvalidRequest
from pdserve.engine.grammar_compiler import GrammarCompiler
from pdserve.engine.grammar_masks import GrammarMasks
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.scheduled_batch import ScheduledSpan
from pdserve.engine.sequence import SequenceSpec
from pdserve.engine.speculative_config import SpeculativeConfig
from pdserve.engine.step_output import FinishReason, StepOutput
from pdserve.engine.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from pdserve.engine.tokenizer import Tokenizer

_EOS = 2
_NUM_IDS = 3 + 256 + 3  # the special tokens, the bytes, the merges
_FORMS = [
    StructuredOutputsParams(regex="(1[0-9][a-z]){8,30}"),
    StructuredOutputsParams(choice=["one of us", "one of you all", "none whatever"]),
    StructuredOutputsParams(grammar='root ::= "(" [a-c] root? ")" | "abc"'),
]
_PROMPTS = [(3,), (5, 9, 11, 40), tuple(range(30, 60)), tuple(range(30, 47))]


@pytest.fixture(scope="module")
def model_dir(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    shutil.copytree(tiny_model(vocab_size=_NUM_IDS), folder, dirs_exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *letters, "on", "ab", "one"]
    merges = [("o", "n"), ("a", "b"), ("on", "e")]
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:3])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _engine(model_dir: Path, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "max_num_batched_tokens": 64}
    return Engine.load(EngineConfig(model_dir=model_dir, **{**defaults, **options}))


def _sampling(form: StructuredOutputsParams, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "seed": 7, "structured_outputs": form, **options})


def _specs(**options: Any) -> list[SequenceSpec]:
    return [
        SequenceSpec(f"{number}-{index}", prompt, _sampling(form, **options))
        for number, form in enumerate(_FORMS)
        for index, prompt in enumerate(_PROMPTS)
    ]


def _run(engine: Engine, specs: list[SequenceSpec]) -> dict[str, list[StepOutput]]:
    for spec in specs:
        engine.add(spec)
    outputs: dict[str, list[StepOutput]] = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            if output.token is not None:
                outputs[output.seq_id].append(output)
        engine.scheduler.check_integrity()
    return outputs


def _ids(outputs: list[StepOutput]) -> list[int]:
    return [
        output.token.token_id for output in outputs if output.token is not None and output.token.token_id is not None
    ]


def _text(model_dir: Path, token_ids: list[int]) -> str:
    return Tokenizer.load(model_dir).decode(token_ids, skip_special_tokens=False)


def _all_ids(runs: dict[str, list[StepOutput]]) -> dict[str, list[int]]:
    return {seq_id: _ids(outputs) for seq_id, outputs in runs.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 5}, {"num_blocks": 24, "max_num_seqs": 6}, {"max_num_seqs": 1}],
    ids=["small chunks", "preemption", "alone"],
)
def test_tokens_do_not_depend_on_company_chunks_or_pressure(
    model_dir: Path, options: dict[str, Any], temperature: float
) -> None:
    expected = _all_ids(_run(_engine(model_dir), _specs(temperature=temperature)))
    free = replace(_specs()[0], seq_id="free", sampling=SamplingParams(max_tokens=24, seed=3, ignore_eos=True))

    engine = _engine(model_dir, **options)
    together = _all_ids(_run(engine, [*_specs(temperature=temperature), free]))

    assert len(together.pop("free")) == 24
    assert together == expected
    if "num_blocks" in options:
        assert engine.load_now().num_preemptions > 0


def test_it_goes_on_elsewhere_from_any_token(model_dir: Path) -> None:
    """The grammar is followed again along the emitted tokens: nothing else travels."""
    first, other = _engine(model_dir), _engine(model_dir)

    for spec in _specs():
        whole = _ids(_run(first, [spec])[spec.seq_id])
        for length in range(1, len(whole)):
            moved = replace(spec, seq_id=f"{spec.seq_id}-{length}", output_token_ids=tuple(whole[:length]))
            assert _ids(_run(other, [moved])[moved.seq_id]) == whole[length:]


def test_split_between_two_engines_equals_one(model_dir: Path) -> None:
    prefill, decode, whole = (_engine(model_dir) for _ in range(3))

    for spec in _specs():
        expected = _ids(_run(whole, [spec])[spec.seq_id])
        prefill.add(replace(spec, is_export=True))
        decode.add_import(spec)
        [(_, needed)] = decode.scheduler.grant_imports()
        while (output := prefill.step()[0]).token is None:
            pass
        table = output.exported_blocks
        decode.land(spec.seq_id, [(index, prefill.block_bytes(table[index])) for index in needed])
        decode.scheduler.commit_import(spec.seq_id, _ids([output]))
        prefill.scheduler.release_export(spec.seq_id)
        rest: list[StepOutput] = []
        while decode.scheduler.has_work:
            rest += decode.step()
        assert _ids([output, *rest]) == expected


def test_branches_of_one_prompt_each_follow_the_grammar(model_dir: Path) -> None:
    sampling = _sampling(_FORMS[1], temperature=2.0, n=6)
    specs = [
        SequenceSpec(str(index), _PROMPTS[2], branch) for index, branch in ((i, sampling.branch(i)) for i in range(6))
    ]
    alone = {spec.seq_id: _ids(_run(_engine(model_dir), [spec])[spec.seq_id]) for spec in specs}
    engine = _engine(model_dir)

    engine.add_branches(specs)
    together: dict[str, list[int]] = {spec.seq_id: [] for spec in specs}
    while engine.scheduler.has_work:
        for output in engine.step():
            together[output.seq_id] += _ids([output])

    assert together == alone
    texts = {_text(model_dir, token_ids) for token_ids in together.values()}
    assert texts <= set(_FORMS[1].choice or ()) and len(texts) > 1


@pytest.mark.parametrize("options", [{}, {"min_tokens": 20, "ignore_eos": True}], ids=["plain", "against the end"])
def test_an_answer_that_is_whole_ends_at_once(model_dir: Path, options: dict[str, Any]) -> None:
    """C103: no token follows what completes the grammar; `min_tokens` and `ignore_eos` do not lengthen it."""
    spec = SequenceSpec("a", (3, 4), _sampling(_FORMS[1], **options))

    outputs = _run(_engine(model_dir), [spec])["a"]

    assert _text(model_dir, _ids(outputs)) in (_FORMS[1].choice or ())
    assert _EOS not in _ids(outputs)
    assert outputs[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_where_more_may_follow_the_end_is_sampled(model_dir: Path, ignore_eos: bool) -> None:
    form = StructuredOutputsParams(regex="x[yz]*")
    sampling = _sampling(form, logit_bias={_EOS: 90}, ignore_eos=ignore_eos, min_tokens=4)

    outputs = _run(_engine(model_dir), [SequenceSpec("a", (3, 4), sampling)])["a"]

    assert re.fullmatch("x[yz]{3}</s>", _text(model_dir, _ids(outputs)))
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_an_answer_cut_by_max_tokens_says_length(model_dir: Path) -> None:
    """C103, C099: a client can tell a cut answer from a whole one."""
    spec = SequenceSpec("a", (3, 4), _sampling(_FORMS[0], max_tokens=3))

    outputs = _run(_engine(model_dir), [spec])["a"]

    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_logprobs_are_of_the_model_and_not_of_the_grammar(model_dir: Path) -> None:
    free = SamplingParams(max_tokens=1, temperature=0.0, seed=1, logprobs=20)
    bound = replace(free, structured_outputs=StructuredOutputsParams(choice=["xyz"]))
    engine = _engine(model_dir)

    [of_model] = _run(engine, [SequenceSpec("free", (3, 4), free)])["free"]
    [of_grammar] = _run(engine, [SequenceSpec("bound", (3, 4), bound)])["bound"]

    assert of_model.token is not None and of_grammar.token is not None
    assert _text(model_dir, _ids([of_grammar])) == "x"
    assert of_grammar.token.top_logprobs == of_model.token.top_logprobs
    assert of_grammar.token.logprob is not None and math.isfinite(of_grammar.token.logprob)


def test_a_grammar_that_fails_ends_its_own_request_only(model_dir: Path) -> None:
    bad = SequenceSpec("bad", (3, 4), _sampling(StructuredOutputsParams(regex="(")))
    good = _specs()[0]
    engine = _engine(model_dir)
    expected = _ids(_run(engine, [good])[good.seq_id])

    runs = _run(engine, [bad, good])

    assert _ids(runs[good.seq_id]) == expected
    assert [output.failure_code for output in runs["bad"]] == ["invalid_request"]
    assert "unclosed group" in (runs["bad"][0].failure or "")


def test_a_check_ahead_names_the_field(model_dir: Path) -> None:
    engine = _engine(model_dir)

    with pytest.raises(InvalidRequest, match="unclosed group") as refused:
        engine.check(SequenceSpec("a", (3,), _sampling(StructuredOutputsParams(regex="("))))

    assert refused.value.field == "structured_outputs"


def test_the_older_name_means_the_same() -> None:
    form = GuidedDecodingParams(regex="a")

    assert SamplingParams(guided_decoding=form) == SamplingParams(structured_outputs=form)


def test_masks_stand_ready_along_a_draft(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    ids = {char: tokenizer.encode(char)[0] for char in "xyzof"}
    masks = GrammarMasks(lambda: GrammarCompiler(tokenizer, frozenset({_EOS})), _NUM_IDS, frozenset({_EOS}))
    form = StructuredOutputsParams(choice=["xyz", "xzzf", "xzyf"])
    draft = (ids["z"], ids["y"], ids["o"], ids["f"])
    span = ScheduledSpan("a", 0, (1,), 1, (), _sampling(form), 1, output_history=(ids["x"],), draft_token_ids=draft)

    masks.start([span])

    allowed = [set((~masks.banned(span.after_drafts(count))).nonzero().flatten().tolist()) for count in range(3)]
    assert allowed == [{ids["y"], ids["z"]}, {ids["y"], ids["z"]}, {ids["f"]}]
    with pytest.raises(GrammarFailed):
        masks.banned(span.after_drafts(3))


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_speculation_changes_nothing(model_dir: Path, temperature: float) -> None:
    specs = _specs(temperature=temperature)
    expected = _all_ids(_run(_engine(model_dir), specs))
    engine = _engine(model_dir, speculative_config=SpeculativeConfig(num_speculative_tokens=4, adaptive=False))

    assert _all_ids(_run(engine, specs)) == expected
    counts = engine.load_now().speculation
    assert counts is not None and counts.num_accepted > 0


def test_a_tokenizer_that_cannot_spell_every_text_is_refused(tiny_model: Any) -> None:
    engine = _engine(tiny_model())

    with pytest.raises(InvalidRequest, match="cannot spell"):
        engine.check(SequenceSpec("a", (3,), _sampling(_FORMS[0])))


def test_a_model_without_an_end_of_sequence_cannot_end_an_answer(model_dir: Path) -> None:
    masks = GrammarMasks(lambda: GrammarCompiler(Tokenizer.load(model_dir), frozenset()), _NUM_IDS, frozenset())

    with pytest.raises(GrammarFailed, match="end-of-sequence"):
        masks.check(_FORMS[0])
