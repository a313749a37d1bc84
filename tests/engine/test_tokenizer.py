import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pdserve.engine.errors import InvalidRequest, ModelError
from pdserve.engine.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  leading spaces and a newline\n\n",
    "naïve café Škoda — 日本語 한국어 العربية 👩‍👩‍👧 🏳️‍🌈",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n\treturn x ** 2  # 12345",
]


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(demo_model_dir)


@pytest.fixture(scope="module")
def reference(demo_model_dir: Path):
    return AutoTokenizer.from_pretrained(demo_model_dir)


@pytest.fixture
def model_copy(demo_model_dir: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_dir / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_and_decode_equal_transformers(tokenizer, reference, text, add_special_tokens):
    token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)

    assert token_ids == reference.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert tokenizer.decode(token_ids, skip_special_tokens=skip) == reference.decode(
            token_ids, skip_special_tokens=skip
        )


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_encodes_as_in_transformers(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference.encode(text)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "Hi <|im_end|>"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_ids_equal_apply_chat_template(tokenizer, reference, messages, add_generation_prompt):
    """C083, C095."""
    text = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)

    expected = reference.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_vocab_size_counts_added_tokens(tokenizer, reference):
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.bos_token_id == reference.bos_token_id


def test_eos_is_the_union_of_both_configs_and_the_tokenizer(model_copy):
    (model_copy / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (model_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9]}))

    assert Tokenizer.load(model_copy).eos_token_ids == {7, 0, 9, 2}


def test_template_is_found_in_documented_order(model_copy):
    """C091."""
    config_path = model_copy / "tokenizer_config.json"
    config = json.loads(config_path.read_text())

    assert Tokenizer.load(model_copy).chat_template is None

    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "listed"},
    ]
    config_path.write_text(json.dumps(config))
    assert Tokenizer.load(model_copy).render_chat([]) == "listed"

    (model_copy / "chat_template.jinja").write_text("from file")
    assert Tokenizer.load(model_copy).render_chat([]) == "from file"

    assert Tokenizer.load(model_copy, chat_template="override").render_chat([]) == "override"


def test_model_without_template_refuses_chat_and_loads(model_copy):
    """C091, C092."""
    tokenizer = Tokenizer.load(model_copy)

    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.encode("works")


def test_directory_without_tokenizer_is_refused_with_its_name(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_token_bytes_join_to_the_text(tokenizer):
    text = "Škoda 👩‍👩‍👧 <|im_end|> x"

    token_ids = tokenizer.encode(text)

    assert b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode() == text
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_half_of_a_surrogate_pair_is_the_callers_mistake(tiny_model: Any) -> None:
    tokenizer = Tokenizer.load(tiny_model())

    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        tokenizer.encode("w5 \ud800")
