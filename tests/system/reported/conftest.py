"""Ways to ask an installation, and one whose model says what a test has written down.

`disaggregated` serves the demo model: there `guided_choice` with one choice makes the real model say a given text.
`scripted` serves a checkpoint in which each token has one successor, over a SentencePiece vocabulary with tokens of
the tests' own: which tokens a text is made of is known there, too.
"""

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_GENERATES = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class Reply:
    """What came back, read to the end of the connection."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True)
class Api:
    """One gateway as its clients see it; every body is read by strict parsers."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def post(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> Reply:
        """Send `body`; underscores in the names of `headers` are hyphens."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            self.url + path, content, {"Content-Type": "application/json", **self.headers, **own}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return Reply(reply.status, reply.headers, reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.headers, error.read())

    def ask(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> dict[str, Any]:
        """Return a whole answer, which a prefill node and a decode node have made."""
        reply = self.post(path, body, **headers)
        assert reply.status == 200, reply.content
        if path in _GENERATES:
            assert reply.headers["x-pdserve-route"] == "disaggregated"
        answer: dict[str, Any] = json.loads(reply.content, parse_constant=_refuse_constant)
        return answer

    def stream(self, path: str, body: Mapping[str, Any], **headers: str) -> list[dict[str, Any]]:
        """Return the events of a streamed answer that ends as it must."""
        reply = self.post(path, {**body, "stream": True}, **headers)
        assert reply.status == 200, reply.content
        return self.events(reply.content)

    def refuse(self, path: str, body: Mapping[str, Any] | bytes, status: int = 400, **headers: str) -> dict[str, Any]:
        """Return the error of a refusal, which is in the envelope that clients read."""
        reply = self.post(path, body, **headers)
        assert reply.status == status, reply.content
        return self.error(reply)

    @staticmethod
    def events(content: bytes) -> list[dict[str, Any]]:
        """Return the events of a stream; comments come before the one `[DONE]`, which is the end."""
        blocks = [block for block in content.decode().split("\n\n") if block and not block.startswith(":")]
        assert content.endswith(b"data: [DONE]\n\n") and blocks.count("data: [DONE]") == 1
        return [json.loads(block.removeprefix("data: "), parse_constant=_refuse_constant) for block in blocks[:-1]]

    @staticmethod
    def error(reply: Reply) -> dict[str, Any]:
        """Return the error in OpenAI's envelope, whoever made it."""
        assert reply.headers["Content-Type"].startswith("application/json")
        body = json.loads(reply.content.decode("utf-8"), parse_constant=_refuse_constant)
        error: dict[str, Any] = body["error"]
        assert set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
        assert error["message"] and isinstance(error["message"], str) and isinstance(error["type"], str)
        assert isinstance(error["param"], str | None) and isinstance(error["code"], str | None)
        assert "None" not in (error["param"], error["code"])
        return error

    @staticmethod
    def text_of(events: list[dict[str, Any]], index: int = 0, name: str = "content") -> str:
        """Return the joined text of one choice; of a chat, the deltas called `name`."""
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        return "".join(choice["text"] if "text" in choice else choice["delta"].get(name) or "" for choice in choices)


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="session")
def api(disaggregated: Any) -> Api:
    """The demo model."""
    return Api(disaggregated.url)


# What the scripted model writes behind a prompt that ends with the token of that name. No token has two successors.
SCRIPTS = {
    "⟦spaces⟧": ["▁", "▁leading", "▁x", "▁hello", "▁world", "<a>"],
    "⟦less⟧": ["<0x3C>", "<a>"],
    "⟦cut tag⟧": ["<think>Well", "</thi", "<a>"],
    "⟦thoughts⟧": ["<think>Since", "▁so", "</think>", "▁it", "▁is", "<a>"],
    "⟦call⟧": ["<tool_call>\n", '{"name": "weather", "', 'arguments": {"city": "', 'Paris"}}', "\n</tool_call>", "<a>"],
    "⟦config⟧": ["▁first", "<a>"],
    "⟦generation config⟧": ["▁second", "<b>"],
    "⟦tokenizer⟧": ["▁third", "<c>"],
}
_AFTER_THE_END = {"<a>": "▁leaked", "<b>": "▁leaked", "<c>": "▁leaked", "▁leaked": "▁leaked"}
_ENDS = {"<a>": "config.json", "<b>": "generation_config.json", "<c>": "tokenizer_config.json"}
# Gemma's, without its marks: no system, and turns alternate.
_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate') }}{%- endif -%}"
    "{{ message.content }}{%- endfor -%}"
)
_KEYS = {"plain": "", "one-a-minute": "requests_per_minute = 1\n"}


@pytest.fixture(scope="session")
def scripted_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a chat template that follows SCRIPTS, and ends on an id of each file that names one."""
    folder = tmp_path_factory.mktemp("scripted")
    ids = _save_tokenizer(folder)
    _save_weights(folder, ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<b>"]], "temperature": 0.5}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<c>"}))
    return folder


def _save_tokenizer(folder: Path) -> dict[str, int]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    written = [token for script in SCRIPTS.values() for token in script]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁leaked", *(t for t in written if t[0] == "▁")]
    ids = {token: token_id for token_id, token in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(_ENDS))
    others = [token for token in (*SCRIPTS, *written) if token not in ids and token not in _ENDS]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in dict.fromkeys(others)])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def _save_weights(folder: Path, ids: Mapping[str, int]) -> None:
    """Save a decoder whose layers add nothing, so that an output row finds the embedding that it is to follow."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=ids["<a>"],
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(len(ids), 128), dim=1)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for token, successor in _successors().items():
            model.lm_head.weight[ids[successor]] += 10 * embeddings[ids[token]]
    model.save_pretrained(folder)


def _successors() -> dict[str, str]:
    successors = dict(_AFTER_THE_END)
    for name, script in SCRIPTS.items():
        for token, successor in zip((name, *script), script, strict=False):
            assert successors.setdefault(token, successor) == successor, f"{token} has two successors"
    return successors


@pytest.fixture(scope="session")
def scripted(running_cluster: Any, scripted_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One prefill and one decode node with the scripted model; shared: leave it as you found it."""
    folder = tmp_path_factory.mktemp("scripted-cluster")
    with running_cluster(folder, scripted_model_dir, 1, 1, ("--num-blocks", "100")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def scripted_api(scripted: Any) -> Api:
    """A gateway without any option, so without a chat template."""
    return Api(scripted.url)


@pytest.fixture(scope="session")
def reading_api(scripted: Any) -> Api:
    """A second gateway of the same nodes: it has a template, reads thoughts and calls, is strict and wants a key."""
    template, keys = scripted.folder / "template.jinja", scripted.folder / "keys.toml"
    template.write_text(_TEMPLATE)
    keys.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{limits}'
            for name, limits in _KEYS.items()
        )
    )
    options = ["--chat-template", str(template), "--api-keys-file", str(keys), "--strict", "--keep-alive-s", "0.1"]
    options += ["--reasoning-parser", "think", "--tool-call-parser", "hermes", "--generation-config", "none"]
    return Api(scripted.start_gateway_beside("reading", *options), {"Authorization": "Bearer plain"})
