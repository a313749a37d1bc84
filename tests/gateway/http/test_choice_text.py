"""One choice's text does not depend on how its tokens were grouped into events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.control.messages import FinishReason, TokenLogprobs
from pdserve.engine.sampling_params import SamplingParams
from pdserve.gateway.choice_text import ChoicePiece, ChoiceText
from pdserve.gateway.generation import GenerationEvent
from pdserve.gateway.generation_plan import Endpoint, GenerationPlan, ReplyOptions

WORDS = " the answer is 👩‍👩‍👧 forty-two\n\naab aaab <|im_start|> Škoda"


def plan_with(stops: list[str], min_tokens: int, include_stop: bool) -> GenerationPlan:
    return GenerationPlan(
        endpoint=Endpoint.COMPLETIONS,
        response_id="cmpl-x",
        created=0,
        model="m",
        prompts=((5,),),
        num_choices=1,
        sampling=SamplingParams(max_tokens=None, min_tokens=min_tokens, stop=tuple(stops)),
        max_tokens=(1000,),
        cache_salt="",
        timeout_s=1.0,
        reply=ReplyOptions(
            is_stream=True,
            include_usage=False,
            continuous_usage=False,
            include_stop=include_stop,
            skip_special_tokens=True,
            return_token_ids=True,
        ),
    )


def run(tokenizer, plan: GenerationPlan, groups: list[list[int]], reason: FinishReason) -> list[ChoicePiece]:
    text = ChoiceText(0, plan, tokenizer)
    pieces: list[ChoicePiece] = []
    start = 0
    for position, group in enumerate(groups):
        is_last = position == len(groups) - 1
        logprobs = tuple(TokenLogprobs(-float(start + i), ()) for i in range(len(group)))
        event = GenerationEvent(start, tuple(group), logprobs, reason if is_last else None)
        start += len(group)
        if (piece := text.push(event)) is not None:
            pieces.append(piece)
        if text.is_stopped:
            break
    return pieces


def summary(pieces: list[ChoicePiece]) -> tuple[object, ...]:
    reasons = [piece.finish_reason for piece in pieces]
    assert reasons[-1] is not None and not any(reasons[:-1])
    tokens = [token for piece in pieces for token in piece.tokens]
    assert len(tokens) == pieces[-1].num_tokens
    assert [token.logprobs.logprob for token in tokens if token.logprobs] == [-float(i) for i in range(len(tokens))]
    return "".join(piece.text for piece in pieces), tokens, reasons[-1]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_grouping_changes_nothing(demo_tokenizer, data):
    """C014, C031."""
    vocabulary = [*demo_tokenizer.encode(WORDS), *range(200, 330)]
    token_ids = data.draw(st.lists(st.sampled_from(vocabulary), min_size=1, max_size=25))
    text = demo_tokenizer.decode(token_ids)
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=3))
    stops = [stop for start, length in cuts if (stop := text[start : start + length])]
    plan = plan_with(stops, data.draw(st.integers(0, 6)), data.draw(st.booleans()))
    reason = data.draw(st.sampled_from(FinishReason))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=len(token_ids), max_size=len(token_ids)))
    groups, start = [], 0
    for size in sizes:
        if token_ids[start : start + size]:
            groups.append(token_ids[start : start + size])
        start += size

    grouped = summary(run(demo_tokenizer, plan, groups, reason))

    assert grouped == summary(run(demo_tokenizer, plan, [[token_id] for token_id in token_ids], reason))
    if not stops and reason is FinishReason.LENGTH:
        assert grouped[0] == text
