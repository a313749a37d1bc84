import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.kvtransfer import FrameError, KVLayout, UnsupportedVersion
from pdserve.kvtransfer.frames import (
    MAX_BLOCKS_PER_MESSAGE,
    MAX_METADATA_BYTES,
    Abort,
    Blocks,
    Credit,
    Done,
    DoneAck,
    Grant,
    Heartbeat,
    Hello,
    Offer,
    Probe,
    ProbeAck,
    Refuse,
    Refused,
    Welcome,
    decode,
    encode,
)

LAYOUT = KVLayout("m", 2, 4, 1, 8, "float16", None, "r", "t")
HASH = bytes(range(16))
MESSAGES = [
    Hello("p", "p1", "d", "d1", LAYOUT, "auto", 10_000),
    Welcome("d", "d1", LAYOUT, LAYOUT, "nobody", ("raw", "zstd"), 10_000, 2**26, None),
    Refused("wrong_node", "not me", None),
    Refused("layout_mismatch", "dtype", LAYOUT),
    Offer("t", 1, (HASH, HASH[::-1]), 7, 30_000),
    Grant("t", 1, (1,)),
    Refuse("t", 1, "no_blocks", "full", True),
    Blocks("t", 1, 0, "raw", 0, 256, (), (1,), (256,), (2**64 - 1,)),
    Credit(256, ()),
    Done("t", 1, 1, 256, b"meta", 7),
    DoneAck("t", 1),
    Abort("t", 1, "cancelled", "gone"),
    Heartbeat((("t", 1), ("u", 2))),
    Probe(3, 256, 7),
    ProbeAck(3),
]
GOLDEN = {
    MESSAGES[0]: (
        "9305a568656c6c6f87a76e6f64655f6964a170ab696e6361726e6174696f6ea27031ac706565725f6e6f64655f69"
        "64a164b0706565725f696e6361726e6174696f6ea26431a66c61796f757489ac6d6f64656c5f646967657374a16d"
        "aa6e756d5f6c617965727302aa626c6f636b5f73697a6504ac6e756d5f6b765f686561647301a8686561645f6469"
        "6d08a56474797065a7666c6f61743136aa686561645f72616e6765c0ae6d6f64656c5f7265766973696f6ea172b0"
        "746f6b656e697a65725f646967657374a174aa776972655f6474797065a46175746fa86c656173655f6d73cd2710"
    ),
    MESSAGES[1]: (
        "9305a777656c636f6d6589a76e6f64655f6964a164ab696e6361726e6174696f6ea26431a66c61796f757489ac6d"
        "6f64656c5f646967657374a16daa6e756d5f6c617965727302aa626c6f636b5f73697a6504ac6e756d5f6b765f68"
        "6561647301a8686561645f64696d08a56474797065a7666c6f61743136aa686561645f72616e6765c0ae6d6f6465"
        "6c5f7265766973696f6ea172b0746f6b656e697a65725f646967657374a174a47769726589ac6d6f64656c5f6469"
        "67657374a16daa6e756d5f6c617965727302aa626c6f636b5f73697a6504ac6e756d5f6b765f686561647301a868"
        "6561645f64696d08a56474797065a7666c6f61743136aa686561645f72616e6765c0ae6d6f64656c5f7265766973"
        "696f6ea172b0746f6b656e697a65725f646967657374a174a9636f6e766572746572a66e6f626f6479a9656e636f"
        "64696e677392a3726177a47a737464a86c656173655f6d73cd2710ac6372656469745f6279746573ce04000000a4"
        "72696e67c0"
    ),
    MESSAGES[2]: (
        "9305a77265667573656483a4636f6465aa77726f6e675f6e6f6465a76d657373616765a66e6f74206d65a66c61796f7574c0"
    ),
    MESSAGES[3]: (
        "9305a77265667573656483a4636f6465af6c61796f75745f6d69736d61746368a76d657373616765a56474797065"
        "a66c61796f757489ac6d6f64656c5f646967657374a16daa6e756d5f6c617965727302aa626c6f636b5f73697a65"
        "04ac6e756d5f6b765f686561647301a8686561645f64696d08a56474797065a7666c6f61743136aa686561645f72"
        "616e6765c0ae6d6f64656c5f7265766973696f6ea172b0746f6b656e697a65725f646967657374a174"
    ),
    MESSAGES[4]: (
        "9305a56f6666657285ab7472616e736665725f6964a174aa67656e65726174696f6e01ac626c6f636b5f68617368"
        "657392c410000102030405060708090a0b0c0d0e0fc4100f0e0d0c0b0a09080706050403020100aa6e756d5f746f"
        "6b656e7307ab646561646c696e655f6d73cd7530"
    ),
    MESSAGES[5]: "9305a56772616e7483ab7472616e736665725f6964a174aa67656e65726174696f6e01a66e65656465649101",
    MESSAGES[6]: (
        "9305a672656675736585ab7472616e736665725f6964a174aa67656e65726174696f6e01a4636f6465a96e6f5f62"
        "6c6f636b73a76d657373616765a466756c6ca9726574727961626c65c3"
    ),
    MESSAGES[7]: (
        "9305a6626c6f636b738aab7472616e736665725f6964a174aa67656e65726174696f6e01a873657175656e636500"
        "a8656e636f64696e67a3726177a5737461727400a66c656e677468cd0100a6706c6163657390a7696e6465786573"
        "9101a573697a657391cd0100a9636865636b73756d7391cfffffffffffffffff"
    ),
    MESSAGES[8]: "9305a663726564697482a96e756d5f6279746573cd0100a6706c6163657390",
    MESSAGES[9]: (
        "9305a4646f6e6586ab7472616e736665725f6964a174aa67656e65726174696f6e01aa6e756d5f626c6f636b7301"
        "a96e756d5f6279746573cd0100a86d65746164617461c4046d657461a8636865636b73756d07"
    ),
    MESSAGES[10]: "9305a8646f6e655f61636b82ab7472616e736665725f6964a174aa67656e65726174696f6e01",
    MESSAGES[11]: (
        "9305a561626f727484ab7472616e736665725f6964a174aa67656e65726174696f6e01a4636f6465a963616e6365"
        "6c6c6564a76d657373616765a4676f6e65"
    ),
    MESSAGES[12]: "9305a968656172746265617481a97472616e73666572739292a1740192a17502",
    MESSAGES[13]: "9305a570726f626583a873657175656e636503a96e756d5f6279746573cd0100a8636865636b73756d07",
    MESSAGES[14]: "9305a970726f62655f61636b81a873657175656e636503",
}


def _num_payloads(message):
    if isinstance(message, Probe):
        return int(message.num_bytes > 0)
    return len(message.indexes) if isinstance(message, Blocks) else 0


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_the_bytes_on_the_wire_are_these(message):
    header = encode(message)

    assert header.hex() == GOLDEN[message]
    assert decode(bytes.fromhex(GOLDEN[message]), _num_payloads(message)) == message


def test_another_version_is_told_apart_from_garbage():
    header = msgpack.packb([6, "credit", {"num_bytes": 1}])

    with pytest.raises(UnsupportedVersion, match="version 6"):
        decode(header)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([5, "nonsense", {}], "unknown tag"),
        ([5, "credit", {}], "exactly num_bytes"),
        ([5, "credit", {"num_bytes": 1, "places": [], "more": 2}], "exactly num_bytes"),
        ([5, "credit", {"num_bytes": -1, "places": []}], "whole number"),
        ([5, "credit", {"num_bytes": True, "places": []}], "whole number"),
        ([5, "credit", {"num_bytes": 1, "places": [1024]}], "1023"),
        ([5, "credit", {"num_bytes": 1.0, "places": []}], "whole number"),
        ([True, "credit", {"num_bytes": 1}], "version"),
        ([5, "credit"], "version, tag, fields"),
        ({"credit": 1}, "version, tag, fields"),
        ([5, "credit", {"num_bytes": msgpack.ExtType(5, b"x")}], "max_ext_len|extension"),
        ([5, "credit", {"num_bytes": msgpack.Timestamp(1, 2), "places": []}], "max_ext_len|whole number"),
        ([5, "done_ack", {"transfer_id": "", "generation": 1}], "transfer_id"),
        ([5, "done_ack", {"transfer_id": "x" * 129, "generation": 1}], "transfer_id"),
        ([5, "done_ack", {"transfer_id": b"t", "generation": 1}], "transfer_id"),
        ([5, "heartbeat", {"transfers": [["t"]]}], "pairs"),
        ([5, "refuse", {**dict.fromkeys(["transfer_id", "code", "message"], "x"), "generation": 1,
                        "retryable": 1}], "true or false"),
        ([5, "offer", {"transfer_id": "t", "generation": 1, "block_hashes": [b"short"], "num_tokens": 1,
                       "deadline_ms": 1}], "block_hashes"),
    ],
)  # fmt: skip
def test_what_is_not_a_message_is_refused_with_the_reason(value, reason):
    with pytest.raises(FrameError, match=reason):
        decode(msgpack.packb(value))


def test_a_tag_that_is_no_text_is_refused():
    with pytest.raises(FrameError):
        decode(msgpack.packb([5, ["credit"], {"num_bytes": 1}]))


def test_payload_frames_must_match_the_header():
    header = encode(Blocks("t", 1, 0, "raw", 0, 8, (), (0, 1), (8, 8), (1, 2)))

    assert decode(header, 1) == decode(header, 2)
    for num_payloads in (0, 3):
        with pytest.raises(FrameError, match=r"1\.\.2 expected"):
            decode(header, num_payloads)
    with pytest.raises(FrameError, match=r"0\.\.0 expected"):
        decode(encode(Credit(1, ())), 1)


@pytest.mark.parametrize("lists", [((), (), ()), ((0,), (), ()), ((0,), (8,), (1, 2))])
def test_the_lists_of_blocks_must_match(lists):
    with pytest.raises(FrameError, match="as many"):
        decode(encode(Blocks("t", 1, 0, "raw", 0, 8, (), *lists)), len(lists[0]))


@pytest.mark.parametrize(
    "message",
    [
        Done("t", 1, 1, 1, bytes(MAX_METADATA_BYTES + 1), 0),
        Blocks("t", 1, 0, "raw", 0, 8, (), *[tuple(range(MAX_BLOCKS_PER_MESSAGE + 1))] * 3),
        DoneAck("x" * 129, 1),
        Credit(-1, ()),
        Abort("t", 1, "c", "é" * 513),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_peer_would_refuse_is_not_encoded(message):
    with pytest.raises(FrameError):
        encode(message)


def test_a_deeply_nested_header_is_refused():
    with pytest.raises(FrameError):
        decode(b"\x91" * 100_000)


@given(st.binary(max_size=300), st.integers(0, 3))
@example(b"", 0)
@example(b"\xdd\xff\xff\xff\xff", 0)
@settings(max_examples=500)
def test_random_bytes_raise_only_frame_errors(header, num_payloads):
    try:
        decode(header, num_payloads)
    except FrameError:
        return


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=1000)
def test_mutated_messages_raise_only_frame_errors(message, data):
    header = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(header) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                header[position] = data.draw(st.integers(0, 255))
            case "cut":
                del header[position : position + data.draw(st.integers(0, 3))]
            case "insert":
                header[position:position] = data.draw(st.binary(max_size=5))
        if not header:
            break
    try:
        decoded = decode(bytes(header), _num_payloads(message))
    except FrameError:
        return
    assert decode(encode(decoded), _num_payloads(decoded)) == decoded
