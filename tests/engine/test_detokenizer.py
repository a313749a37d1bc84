from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from pdserve.engine.detokenizer import IncrementalDetokenizer
from pdserve.engine.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog does not mind",
    "hello hello world, it's a wonderful world! isn't it?",
    "naïve café résumé 日本語 emoji",
] * 4
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _metaspace() -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(special_tokens=SPECIALS, vocab_size=200))
    return backend


def _sentencepiece_with_bytes() -> Backend:
    seed = Backend(models.BPE(unk_token="<unk>"))
    seed.pre_tokenizer = pre_tokenizers.Metaspace()
    seed.train_from_iterator(CORPUS, trainers.BpeTrainer(special_tokens=SPECIALS + BYTES, vocab_size=500))
    backend = Backend(models.BPE(seed.get_vocab(), [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


def _unigram_with_bytes() -> Backend:
    seed = Backend(models.Unigram())
    seed.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(special_tokens=SPECIALS, vocab_size=200, unk_token="<unk>")
    seed.train_from_iterator(CORPUS, trainer)
    pieces = [(piece, -5.0) for piece in seed.get_vocab() if piece not in SPECIALS]
    vocabulary = [*((each, 0.0) for each in SPECIALS), *((each, -9.0) for each in BYTES), *sorted(pieces)]
    backend = Backend(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(SPECIALS)
    return backend


def _wordpiece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(special_tokens=SPECIALS, vocab_size=200))
    return backend


def _suffixed_bpe() -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(special_tokens=SPECIALS, vocab_size=200, end_of_word_suffix="</w>")
    backend.train_from_iterator(CORPUS, trainer)
    return backend


FAMILIES = {
    "metaspace": _metaspace,
    "sentencepiece_with_bytes": _sentencepiece_with_bytes,
    "unigram_with_bytes": _unigram_with_bytes,
    "wordpiece": _wordpiece,
    "suffixed_bpe": _suffixed_bpe,
}


@pytest.fixture(scope="module")
def byte_level(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(demo_model_dir)


@pytest.fixture(scope="module", params=FAMILIES)
def other(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(FAMILIES[request.param](), {}, frozenset(), None)


@pytest.fixture(scope="module")
def with_bytes() -> Tokenizer:
    return Tokenizer(_sentencepiece_with_bytes(), {}, frozenset(), None)


def _pieces(tokenizer: Tokenizer, token_ids: list[int], **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*[detokenizer.push(token_id) for token_id in token_ids], detokenizer.finish()]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_decoded_text_for_random_ids_of_the_demo_model(byte_level, data, skip):
    """C026, C027."""
    limit = byte_level.vocab_size + 2
    token_ids = data.draw(st.lists(st.one_of(st.integers(0, limit), st.integers(0, 300)), max_size=40))

    assert "".join(_pieces(byte_level, token_ids, skip_special_tokens=skip)) == byte_level.decode(
        token_ids, skip_special_tokens=skip
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_decoded_text_for_random_ids_of_other_families(other, data, skip):
    """C025, C026, C027."""
    token_ids = data.draw(st.lists(st.integers(0, other.vocab_size + 2), max_size=40))

    assert "".join(_pieces(other, token_ids, skip_special_tokens=skip)) == other.decode(
        token_ids, skip_special_tokens=skip
    )


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_valid_text_never_shows_a_replacement_character(byte_level, text):
    token_ids = byte_level.encode(text, add_special_tokens=False)
    # The demo vocabulary lacks tokens for a few bytes: texts that need them do not come back whole.
    assume(byte_level.decode(token_ids, skip_special_tokens=False) == text and "\ufffd" not in text)

    pieces = _pieces(byte_level, token_ids, skip_special_tokens=False)

    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40), skip=st.booleans())
def test_pieces_join_to_the_decoded_text_for_random_texts_of_other_families(other, text, skip):
    """Whatever the vocabulary makes of a text: pieces, bytes or unknown tokens."""
    token_ids = other.encode(text, add_special_tokens=False)

    assert "".join(_pieces(other, token_ids, skip_special_tokens=skip)) == other.decode(
        token_ids, skip_special_tokens=skip
    )


def test_split_emoji_is_held_until_it_is_whole(byte_level):
    """C021."""
    token_ids = byte_level.encode("👩‍👩‍👧", add_special_tokens=False)
    assert len(token_ids) > 3

    pieces = _pieces(byte_level, token_ids)

    assert "".join(pieces) == "👩‍👩‍👧"
    assert "" in pieces[:-1]


def test_character_cut_at_the_end_becomes_one_replacement_character(byte_level):
    """C024."""
    token_ids = byte_level.encode("ok 😀", add_special_tokens=False)[:-1]

    pieces = _pieces(byte_level, token_ids)

    assert "".join(pieces) == "ok \ufffd" == byte_level.decode(token_ids)
    assert "\ufffd" not in "".join(pieces[:-1])


def test_bytes_of_one_character_are_held_until_the_run_ends(with_bytes):
    backend_ids = [with_bytes._backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    word = with_bytes._backend.token_to_id("▁")

    pieces = _pieces(with_bytes, [word, *backend_ids, word])

    assert pieces == ["", "", "", "", "", "😀 ", ""]


def test_prompt_context_keeps_the_space_in_front_of_the_first_word(other):
    """C025, C026."""
    ids = other.encode("hello world", add_special_tokens=False)
    whole = other.decode(ids)

    for cut in range(1, len(ids)):
        before = other.decode(ids[:cut])
        pieces = _pieces(other, ids[cut:], context_token_ids=ids[:cut])
        assert before + "".join(pieces) == whole


def test_specials_between_words_do_not_eat_their_spaces(with_bytes):
    ids = with_bytes.encode("a b", add_special_tokens=False)
    special = with_bytes._backend.token_to_id("</s>")
    mixed = [special, *ids[:2], special, *ids[2:]]

    assert "".join(_pieces(with_bytes, mixed)) == with_bytes.decode(mixed)


def test_work_per_token_does_not_grow_with_the_length(other, monkeypatch):
    lengths: list[int] = []
    decode = other.decode

    def counting(token_ids, skip_special_tokens=True):
        lengths.append(len(token_ids))
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(other, "decode", counting)
    _pieces(other, other.encode("the quick brown fox " * 100, add_special_tokens=False))

    assert max(lengths) <= 17
