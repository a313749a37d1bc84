"""Golden bytes, roundtrips of arbitrary messages, arbitrary bytes that may do no worse than MessageError."""

import dataclasses
import math

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.control.codec import MAX_MESSAGE_BYTES, decode, encode
from pdserve.control.errors import MalformedMessage, MessageError, UnknownTag, UnknownVersion
from pdserve.control.messages import (
    PROTOCOL_VERSION,
    BlockCounts,
    CancelTask,
    DecodeTask,
    DurationCounts,
    FinishReason,
    Fork,
    GenerationTask,
    LinkReport,
    Message,
    NodeInfo,
    NodeLoad,
    NodeRole,
    PeerCounts,
    Ping,
    Pong,
    PrefillTask,
    ProbeLink,
    SpeculationCounts,
    Stage,
    StageReport,
    TaskFailed,
    Tier,
    TierCounts,
    TokenBatch,
    TokenChunk,
    TokenLogprobs,
    TransferCounts,
)
from pdserve.engine.sampling_params import SamplingParams

identifiers = st.text(max_size=64)
counts = st.integers(0, 2**63 - 1)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
numbers = st.floats(0, 1e9, allow_nan=False)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 4096),
    temperature=st.floats(0, 2) | st.integers(0, 2),
    top_k=st.integers(-1, 100),
    top_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=4).map(tuple),
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 99), max_size=4),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=9, max_size=20, unique=True),
    priority=st.integers(-(2**31), 2**31 - 1),
    bad_words_ids=st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), max_size=4),
    speculative=st.booleans(),
)
tasks = st.builds(
    GenerationTask,
    request_id=identifiers,
    attempt_id=identifiers,
    prompt_token_ids=token_ids,
    output_token_ids=token_ids,
    sampling=samplings,
    cache_salt=identifiers,
    timeout_s=numbers,
    forks=st.lists(st.builds(Fork, attempt_id=identifiers, seed=st.integers(-(2**63), 2**63 - 1)), max_size=3).map(
        tuple
    ),
)
blocks = st.builds(BlockCounts, **dict.fromkeys(("total", "free", "cached", "in_use", "in_flight"), counts))
transfers = st.builds(
    TransferCounts,
    **dict.fromkeys(("bytes_sent", "bytes_received", "blocks_sent", "blocks_skipped", "open"), counts),
)
durations = st.builds(DurationCounts, buckets=st.lists(counts, max_size=4).map(tuple), sum_s=numbers)
peers = st.builds(
    PeerCounts,
    peer=identifiers,
    bytes_per_s=numbers,
    failures=st.lists(st.tuples(identifiers, counts), max_size=3).map(tuple),
    **dict.fromkeys(("bytes_sent", "bytes_received", "open", "completed", "lease_expiries"), counts),
    **dict.fromkeys(("bytes_shared", "shared_memory_failures"), counts),
    **{f"blocks_{fate}": counts for fate in ("sent", "received", "skipped", "refused", "converted", "compressed")},
    **dict.fromkeys(("offer_to_grant", "first_block", "tail"), durations),
)
tiers = st.builds(
    TierCounts,
    tier=st.sampled_from(Tier),
    **dict.fromkeys(("blocks", "max_blocks", "bytes", "hits", "misses", "corrupt"), counts),
)
loads = st.builds(
    NodeLoad,
    ready=st.booleans(),
    running=counts,
    waiting=counts,
    waiting_tokens=counts,
    prefill_tokens_per_s=st.none() | numbers,
    progress_age_s=numbers,
    blocks=blocks,
    transfer=transfers,
    speculation=st.none() | st.builds(SpeculationCounts, method=identifiers, drafted=counts, accepted=counts),
    tiers=st.lists(tiers, max_size=3).map(tuple),
    preemptions=counts,
    swaps=counts,
    peers=st.lists(peers, max_size=2).map(tuple),
    malformed=counts,
    refused_connections=counts,
)
infos = st.builds(
    NodeInfo,
    node_id=identifiers,
    role=st.sampled_from(NodeRole),
    incarnation=identifiers,
    control_endpoint=identifiers,
    transfer_endpoint=st.none() | identifiers,
    model_name=identifiers,
    model_digest=identifiers,
    max_model_len=st.integers(1, 2**31),
    block_size=st.integers(1, 512),
    num_blocks=counts,
    version=identifiers,
    events_endpoint=st.none() | identifiers,
    events_replay_endpoint=st.none() | identifiers,
)
logprob_values = st.floats(max_value=0, allow_nan=False)
logprobs = st.builds(
    TokenLogprobs,
    logprob=logprob_values,
    top=st.lists(st.tuples(st.integers(0, 2**31 - 1), logprob_values), max_size=5).map(tuple),
)
chunks = st.builds(
    TokenChunk,
    attempt_id=identifiers,
    start=counts,
    token_ids=token_ids,
    logprobs=st.none() | st.lists(logprobs, max_size=4).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    num_cached_tokens=st.none() | counts,
    prompt_logprobs=st.none() | st.lists(logprobs, max_size=4).map(tuple),
    queue_s=st.none() | numbers,
)
messages = st.one_of(
    st.builds(Ping, gateway_id=identifiers, sequence=counts),
    st.builds(
        PrefillTask,
        task=tasks,
        transfer_id=identifiers,
        decode_endpoint=identifiers,
        decode_node_id=identifiers,
        decode_incarnation=identifiers,
    ),
    st.builds(DecodeTask, task=tasks, transfer_id=st.none() | identifiers),
    st.builds(CancelTask, attempt_id=identifiers, reason=identifiers),
    st.builds(Pong, sequence=counts, info=infos, load=loads, attempt_ids=st.lists(identifiers, max_size=3).map(tuple)),
    st.builds(TokenBatch, chunks=st.lists(chunks, max_size=3).map(tuple)),
    st.builds(
        ProbeLink,
        size_bytes=st.integers(1, 2**40),
        timeout_s=numbers,
        **dict.fromkeys(("probe_id", "decode_endpoint", "decode_node_id", "decode_incarnation"), identifiers),
    ),
    st.builds(
        LinkReport,
        probe_id=identifiers,
        code=st.none() | identifiers,
        message=identifiers,
        field=st.none() | identifiers,
        is_encrypted=st.booleans(),
        shares_memory=st.booleans(),
        **dict.fromkeys(("connect_s", "round_trip_s", "bytes_per_s"), st.none() | numbers),
    ),
    st.builds(StageReport, attempt_id=identifiers, stage=st.sampled_from(Stage)),
    st.builds(TaskFailed, attempt_id=identifiers, code=identifiers, message=identifiers, retryable=st.booleans()),
)


GOLDEN: list[tuple[Message, str]] = [
    (
        Ping("gw", 7),
        "9309a470696e6782aa676174657761795f6964a26777a873657175656e636507",
    ),
    (
        ProbeLink("x", "tcp://h:2", "d", "i", 1024, 2.0),
        "9309aa70726f62655f6c696e6b86a870726f62655f6964a178af6465636f64655f656e64706f696e74a97463703a2f"
        "2f683a32ae6465636f64655f6e6f64655f6964a164b26465636f64655f696e6361726e6174696f6ea169aa73697a65"
        "5f6279746573cd0400a974696d656f75745f73cb4000000000000000",
    ),
    (
        LinkReport("x", None, "", None, None, 0.5, 1e9, True),
        "9309ab6c696e6b5f7265706f727489a870726f62655f6964a178a4636f6465c0a76d657373616765a0a56669656c64"
        "c0a9636f6e6e6563745f73c0ac726f756e645f747269705f73cb3fe0000000000000ab62797465735f7065725f73cb"
        "41cdcd6500000000ac69735f656e63727970746564c3ad7368617265735f6d656d6f7279c2",
    ),
    (
        StageReport("r:1", Stage.DECODING),
        "9309ac73746167655f7265706f727482aa617474656d70745f6964a3723a31a57374616765a86465636f64696e67",
    ),
    (
        TokenBatch(
            (
                TokenChunk("r:1", 1, (5, 70000), None, None, None),
                TokenChunk("s:1", 0, (5,), (TokenLogprobs(-0.5, ((5, -0.5),)),), FinishReason.STOP, None, (), 0.25),
                TokenChunk("t:2", 9, (), None, FinishReason.LENGTH, None),
            )
        ),
        "9309ab746f6b656e5f626174636881a66368756e6b739393a3723a31019205ce0001117098a3733a310091059192cb"
        "bfe0000000000000919205cbbfe0000000000000a473746f70c090cb3fd000000000000095a3743a320990c0a66c65"
        "6e677468",
    ),
    (
        Pong(
            3,
            NodeInfo("p", NodeRole.PREFILL, "i", "tcp://h:1", None, "m", "d", 512, 16, 9, "0.1.0", "tcp://h:3"),
            NodeLoad(
                True,
                1,
                0,
                0,
                None,
                0.0,
                BlockCounts(9, 8, 0, 1, 0),
                TransferCounts(0, 0, 0, 0, 0),
                SpeculationCounts("ngram", 7, 5),
                (TierCounts(Tier.HOST, 1, 2, 3, 4, 5, 6),),
                8,
                7,
                (
                    PeerCounts(
                        "d",
                        *(1, 2, 3.0, 4, 5, 6, 7, 8, 14, 15, 16, 9, 10, 11),
                        (("peer_lost", 12),),
                        *(DurationCounts((1,), 0.5),) * 3,
                    ),
                ),
                13,
                17,
            ),
            ("r:1",),
        ),
        "9309a4706f6e6784a873657175656e636503a4696e666f8da76e6f64655f6964a170a4726f6c65a770726566696c6c"
        "ab696e6361726e6174696f6ea169b0636f6e74726f6c5f656e64706f696e74a97463703a2f2f683a31b17472616e73"
        "6665725f656e64706f696e74c0aa6d6f64656c5f6e616d65a16dac6d6f64656c5f646967657374a164ad6d61785f6d"
        "6f64656c5f6c656ecd0200aa626c6f636b5f73697a6510aa6e756d5f626c6f636b7309af6576656e74735f656e6470"
        "6f696e74a97463703a2f2f683a33b66576656e74735f7265706c61795f656e64706f696e74c0a776657273696f6ea5"
        "302e312e30a46c6f61648fa57265616479c3a772756e6e696e6701a777616974696e6700ae77616974696e675f746f"
        "6b656e7300b470726566696c6c5f746f6b656e735f7065725f73c0ae70726f67726573735f6167655f73cb00000000"
        "00000000a6626c6f636b7385a5746f74616c09a46672656508a663616368656400a6696e5f75736501a9696e5f666c"
        "6967687400a87472616e7366657285aa62797465735f73656e7400ae62797465735f726563656976656400ab626c6f"
        "636b735f73656e7400ae626c6f636b735f736b697070656400a46f70656e00ab73706563756c6174696f6e83a66d65"
        "74686f64a56e6772616da76472616674656407a8616363657074656405a574696572739187a474696572a4686f7374"
        "a6626c6f636b7301aa6d61785f626c6f636b7302a5627974657303a46869747304a66d697373657305a7636f727275"
        "707406ab707265656d7074696f6e7308a5737761707307a5706565727391de0013a470656572a164ab62797465735f"
        "7065725f73cb4008000000000000a86661696c757265739192a9706565725f6c6f73740caa62797465735f73656e74"
        "01ae62797465735f726563656976656402a46f70656e09a9636f6d706c657465640aae6c656173655f657870697269"
        "65730bab626c6f636b735f73656e7404af626c6f636b735f726563656976656405ae626c6f636b735f736b69707065"
        "6406ae626c6f636b735f7265667573656407b0626c6f636b735f636f6e76657274656408b1626c6f636b735f636f6d"
        "707265737365640eac62797465735f7368617265640fb67368617265645f6d656d6f72795f6661696c7572657310ae"
        "6f666665725f746f5f6772616e7482a76275636b6574739101a573756d5f73cb3fe0000000000000ab66697273745f"
        "626c6f636b82a76275636b6574739101a573756d5f73cb3fe0000000000000a47461696c82a76275636b6574739101"
        "a573756d5f73cb3fe0000000000000a96d616c666f726d65640db3726566757365645f636f6e6e656374696f6e7311"
        "ab617474656d70745f69647391a3723a31",
    ),
    (
        DecodeTask(
            GenerationTask("r", "r:1", (5,), (), SamplingParams(seed=1), "", 2.0, (Fork("s:1", -9),)),
            None,
        ),
        "9309ab6465636f64655f7461736b82a47461736b88aa726571756573745f6964a172aa617474656d70745f6964a372"
        "3a31b070726f6d70745f746f6b656e5f6964739105b06f75747075745f746f6b656e5f69647390a873616d706c696e"
        "67de0015aa6d61785f746f6b656e7310aa6d696e5f746f6b656e7300ab74656d7065726174757265cb3ff000000000"
        "0000a5746f705f6b00a5746f705f70cb3ff0000000000000a56d696e5f70cb0000000000000000a47365656401a473"
        "746f7090ae73746f705f746f6b656e5f69647390aa69676e6f72655f656f73c2a86c6f6770726f6273c0af70726f6d"
        "70745f6c6f6770726f6273c0b070726573656e63655f70656e616c7479cb0000000000000000b16672657175656e63"
        "795f70656e616c7479cb0000000000000000b272657065746974696f6e5f70656e616c7479cb3ff0000000000000aa"
        "6c6f6769745f6269617390b1616c6c6f7765645f746f6b656e5f696473c0ad6261645f776f7264735f69647390ab73"
        "706563756c6174697665c3b2737472756374757265645f6f757470757473c0a87072696f7269747900aa6361636865"
        "5f73616c74a0a974696d656f75745f73cb4000000000000000a5666f726b739182aa617474656d70745f6964a3733a"
        "31a473656564f7ab7472616e736665725f6964c0",
    ),
]


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_bytes_on_the_wire_stay_what_they_are(message: Message, golden: str) -> None:
    assert encode(message).hex() == golden
    assert decode(bytes.fromhex(golden)) == message


@given(messages)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)


wire_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200)
@given(messages, st.data(), wire_values)
def test_a_field_of_any_other_value_is_refused_or_is_that_value(
    message: Message, data: st.DataObject, value: object
) -> None:
    version, tag, fields = msgpack.unpackb(encode(message))
    target = data.draw(st.sampled_from(sorted(fields)))
    fields[target] = value

    try:
        decoded = decode(msgpack.packb([version, tag, fields]))
    except MessageError:
        return

    again = msgpack.unpackb(encode(decoded))[2][target]
    assert again == value or (isinstance(value, float) and math.isnan(value))


def _damaged(**changes: object) -> bytes:
    fields: dict[str, object] = {"gateway_id": "g", "sequence": 1} | changes
    return bytes(msgpack.packb([PROTOCOL_VERSION, "ping", fields]))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (msgpack.packb([PROTOCOL_VERSION + 1, "ping", {}]), UnknownVersion),
        (msgpack.packb([True, "ping", {}]), UnknownVersion),
        (msgpack.packb([PROTOCOL_VERSION, "shout", {}]), UnknownTag),
        (msgpack.packb([PROTOCOL_VERSION, ["ping"], {}]), UnknownTag),
        (msgpack.packb([PROTOCOL_VERSION, "ping"]), MalformedMessage),
        (msgpack.packb([PROTOCOL_VERSION, "ping", {"gateway_id": "g"}]), MalformedMessage),
        (_damaged(extra=1), MalformedMessage),
        (_damaged(sequence=True), MalformedMessage),
        (_damaged(sequence=-1), MalformedMessage),
        (_damaged(sequence=2**63), MalformedMessage),
        (_damaged(gateway_id="x" * 513), MalformedMessage),
        (_damaged(gateway_id=b"g"), MalformedMessage),
        (_damaged(gateway_id=msgpack.ExtType(4, b"g")), MalformedMessage),
        (b"", MalformedMessage),
        (encode(Ping("g", 1)) + b"\0", MalformedMessage),
        (b"\x91" * 100_000, MalformedMessage),
        (b"\0" * (MAX_MESSAGE_BYTES + 1), MalformedMessage),
    ],
)
def test_each_kind_of_damage_has_its_error(data: bytes, kind: type[MessageError]) -> None:
    with pytest.raises(kind):
        decode(data)


def test_the_error_names_the_place() -> None:
    task = GenerationTask("r", "r:1", (1,), (), SamplingParams(seed=1), "", 1.0)
    version, tag, fields = msgpack.unpackb(encode(DecodeTask(task, None)))
    fields["task"]["sampling"]["top_p"] = "high"

    with pytest.raises(MalformedMessage) as caught:
        decode(msgpack.packb([version, tag, fields]))

    assert caught.value.where == "decode_task.task.sampling.top_p"


def test_sampling_that_its_own_check_refuses_is_malformed() -> None:
    task = GenerationTask("r", "r:1", (1,), (), SamplingParams(seed=1), "", 1.0)
    version, tag, fields = msgpack.unpackb(encode(DecodeTask(task, None)))
    fields["task"]["sampling"]["temperature"] = 99.0

    with pytest.raises(MalformedMessage, match="temperature"):
        decode(msgpack.packb([version, tag, fields]))


def test_sampling_fields_are_all_on_the_wire() -> None:
    task = GenerationTask("r", "r:1", (1,), (), SamplingParams(seed=1), "", 1.0)

    fields = msgpack.unpackb(encode(DecodeTask(task, None)))[2]

    of_a_prompt = {"n", "best_of"}  # branches are on the wire one by one
    of_text = {"bad_words", "include_stop_str_in_output", "skip_special_tokens"}  # nodes know no text
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(fields["task"]["sampling"]) == known - of_a_prompt - of_text


def test_prose_for_people_is_cut_where_an_identifier_is_refused() -> None:
    failed = TaskFailed("r:1", "engine_error", "x" * 10_000 + "\ud800", retryable=False)

    decoded = decode(encode(failed))

    assert isinstance(decoded, TaskFailed) and decoded.message == "x" * 4096
    assert decode(encode(CancelTask("r:1", "\ud800"))) == CancelTask("r:1", "?")
    for too_much in (CancelTask("x" * 513, "r"), CancelTask("\ud800", "r")):
        with pytest.raises(MalformedMessage):
            encode(too_much)


def _batch_of(*row: object) -> bytes:
    return bytes(msgpack.packb([PROTOCOL_VERSION, "token_batch", {"chunks": [["r:1", 0, [5]], list(row)]}]))


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (["r:1", 0], "chunks"),
        (["r:1", 0, [5], None], "chunks"),  # has a shorter form: one message, one way to write it
        (["r:1", 0, [5], None, None, 1, None, None], "chunks"),
        (["r:1", 0, [5], *[None] * 4, 0.5, 1], "chunks"),
        (["r:1", -1, [5]], "chunks.start"),
        (["r:1", 0, [-5]], "chunks.token_ids"),
        (["r:1", 0, [5], [[-0.5]]], "chunks.logprobs"),
        (["r:1", 0, [5], None, "tired"], "chunks.finish_reason"),
    ],
)
def test_a_damaged_row_of_tokens_is_refused_with_its_place(row: list[object], where: str) -> None:
    assert decode(_batch_of("r:1", 0, [5])) == TokenBatch((TokenChunk("r:1", 0, (5,), None, None, None),) * 2)

    with pytest.raises(MalformedMessage) as caught:
        decode(_batch_of(*row))

    assert caught.value.where == f"token_batch.{where}"


def test_a_token_more_is_a_few_bytes_more() -> None:
    def size(num_chunks: int) -> int:
        return len(encode(TokenBatch((TokenChunk("r:1", 3, (70000,), None, None, None),) * num_chunks)))

    assert size(15) - size(5) == 10 * 12  # the array, the id, the position, the token
