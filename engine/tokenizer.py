"""The tokenizer of a Hugging Face model directory: text <-> token ids, special tokens, chat text.

Built on the `tokenizers` package alone, so that a gateway needs neither torch nor transformers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pdserve.engine.chat_template import ChatMessage, ChatTemplate, find_chat_template
from pdserve.engine.errors import InvalidRequest, ModelError

_REPLACED_SPACE = "▁"


class Tokenizer:
    """Text <-> token ids of one model. Immutable once loaded; safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        chat_template: ChatTemplate | None,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._added = {token_id: added.content for token_id, added in backend.get_added_tokens_decoder().items()}
        self._special_ids = frozenset(
            token_id for token_id, added in backend.get_added_tokens_decoder().items() if added.special
        )
        decoder = json.loads(backend.to_str())["decoder"]
        self._byte_level = _is_byte_level(decoder)
        self._byte_fallback = '"ByteFallback"' in json.dumps(decoder)
        self._token_bytes: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocabulary), default=1)

    @classmethod
    def load(cls, model_dir: Path, chat_template: str | None = None) -> "Tokenizer":
        """Read tokenizer.json and its neighbours; `chat_template` overrides the model's own.

        Raises:
            ModelError: there is no usable tokenizer.json.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{model_dir} has no tokenizer.json; save the model with a fast tokenizer")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for a file that it cannot read
            raise ModelError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
        special_tokens = _special_tokens(model_dir, tokenizer_config)
        source = find_chat_template(model_dir, tokenizer_config, chat_template)
        return cls(
            backend,
            special_tokens,
            _eos_token_ids(model_dir, backend, special_tokens),
            ChatTemplate(source, special_tokens) if source is not None else None,
        )

    @property
    def bos_token_id(self) -> int | None:
        """Return the id of the beginning-of-sequence token, if the model has one."""
        token = self._special_tokens.get("bos_token")
        return None if token is None else self._token_id(token)

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of tokens is the concatenation of their bytes."""
        return self._byte_level

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; releases the GIL, so a thread may run it beside an event loop.

        Raises:
            InvalidRequest: the text holds half of a surrogate pair.
        """
        try:
            # encode() holds the GIL (0.9 s for 1 MB); the batch call releases it and skips offsets.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:  # what the package says of text that is not Unicode
            raise InvalidRequest("text", "contains half of a surrogate pair, which is no character") from None
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, as the tokenizer itself decodes them; unknown ids have no text."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[ChatMessage], **options: Any) -> str:
        """Return the prompt text of a conversation; the options are those of `ChatTemplate.render`.

        Encode it with `add_special_tokens=False`: the template prints its own.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequest("messages", "the model has no chat template; use /v1/completions")
        return self.chat_template.render(messages, **options)

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a special token, left out of text by `skip_special_tokens`."""
        return token_id in self._special_ids

    def is_special_text(self, text: str) -> bool:
        """Whether `text` is a special token."""
        token_id = self._token_id(text)
        return token_id is not None and self.is_special(token_id)

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether `token_id` stands for one raw byte in a vocabulary that is otherwise text."""
        return self._byte_fallback and _fallback_byte(self._backend.id_to_token(token_id)) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that `token_id` stands for inside a text; empty for an unknown id."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._find_token_bytes(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """Return the text of a byte-level token behind whole characters; None if it holds a part of one."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._whole_texts[token_id] = text
            return text

    def _find_token_bytes(self, token_id: int) -> bytes:
        token = self._added.get(token_id) or self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()
        if self._byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes([byte])
        if token_id in self._added:
            return token.encode()
        return token.replace(_REPLACED_SPACE, " ").encode()

    def _token_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return [part["type"] for part in decoder["decoders"]] == ["ByteLevel"]
    return bool(decoder["type"] == "ByteLevel")


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's map: printable bytes stand for themselves, the others for code points from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    chars = {chr(byte): byte for byte in printable}
    chars.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return chars


_BYTE_OF_CHAR = _byte_of_char()


def _fallback_byte(token: str | None) -> int | None:
    if token is None or len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _special_tokens(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens (bos_token, eos_token, ...); tokenizer_config.json wins."""
    merged = {**_read_json(model_dir / "special_tokens_map.json"), **tokenizer_config}
    tokens: dict[str, str] = {}
    for name, value in merged.items():
        if not name.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _eos_token_ids(model_dir: Path, backend: Backend, special_tokens: Mapping[str, str]) -> frozenset[int]:
    """Return every id that ends a sequence: the union of both configs and the tokenizer."""
    config = _read_json(model_dir / "config.json")
    generation_config = _read_json(model_dir / "generation_config.json")
    text_config = config.get("text_config")
    found: set[int] = set()
    for source in (config, text_config if isinstance(text_config, dict) else {}, generation_config):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    token = special_tokens.get("eos_token")
    if token is not None and (token_id := backend.token_to_id(token)) is not None:
        found.add(token_id)
    return frozenset(found)
