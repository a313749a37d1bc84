"""What a user may call a model, and what they are told when it cannot be served."""

import hashlib
import json
import pwd
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from pdserve.engine.environment import default_models_dir
from pdserve.engine.errors import ModelError
from pdserve.engine.model_source import check_model_dir, resolve_model


def ignore(line: str) -> None:
    assert line


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return default_models_dir()


def test_complete_directory_is_taken_as_it_is(model_dir: Path) -> None:
    assert resolve_model(str(model_dir), progress=ignore) == model_dir


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(model_dir: Path, name: str) -> None:
    (model_dir / name).unlink()

    with pytest.raises(ModelError, match=f"missing {name};"):
        resolve_model(str(model_dir), progress=ignore)


def test_missing_shard_of_the_index_is_named(model_dir: Path) -> None:
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model_dir / "model-1.safetensors").write_bytes(b"weights")

    with pytest.raises(ModelError, match=r"missing model-2\.safetensors;"):
        check_model_dir(model_dir)


def test_config_that_is_not_json_is_named(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("{")

    with pytest.raises(ModelError, match=r"config\.json: not readable as JSON"):
        check_model_dir(model_dir)


def test_config_without_model_type_is_refused(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("{}")

    with pytest.raises(ModelError, match="no model_type"):
        check_model_dir(model_dir)


def test_unknown_path_says_what_can_be_given() -> None:
    with pytest.raises(ModelError, match=r"no such directory or file.*\.gguf file"):
        resolve_model("/no/such/model", progress=ignore)


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"PK\x03\x04")

    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve_model(str(path), progress=ignore)


def test_unreachable_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ModelError, match="or give the path of a model directory"):
        resolve_model("no-such-owner/no-such-model", progress=ignore)


def test_converted_gguf_is_found_by_its_content(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "My Model.gguf"
    path.write_bytes(b"GGUF and so on")
    digest = hashlib.sha256(b"GGUF and so on").hexdigest()
    converted = cache_dir / f"my-model-{digest[:12]}"
    converted.mkdir(parents=True)

    assert resolve_model(str(path), progress=ignore) == converted


def test_models_are_kept_where_the_caller_says(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    converted = tmp_path / "elsewhere" / f"model-{hashlib.sha256(b'GGUF').hexdigest()[:12]}"
    converted.mkdir(parents=True)

    assert resolve_model(str(path), progress=ignore, models_dir=tmp_path / "elsewhere") == converted
    assert not cache_dir.exists()


def test_a_cache_that_cannot_be_written_is_named_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")

    with pytest.raises(ModelError, match=r"kept in .*model\.gguf/models, which cannot be written .*XDG_CACHE_HOME"):
        resolve_model(str(path), progress=ignore, models_dir=path / "models")


def test_a_user_without_a_home_may_serve_a_directory_and_is_told_what_all_else_needs(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_unknown(user_id: int) -> NoReturn:
        raise KeyError(user_id)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", is_unknown)

    assert resolve_model(str(model_dir), progress=ignore) == model_dir
    with pytest.raises(ModelError, match=r"no home directory .*set XDG_CACHE_HOME"):
        resolve_model("demo", progress=ignore)


def test_broken_gguf_leaves_nothing_behind_and_shows_the_reason(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(64))

    with pytest.raises(
        ModelError, match=r"(?s)converting broken\.gguf failed \(exit code 1.*incomplete \(fetch it again\)"
    ):
        resolve_model(str(path), progress=ignore)

    assert [entry.name for entry in cache_dir.iterdir() if not entry.name.endswith(".lock")] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_starts_convert_the_demo_model_once_and_leave_nothing_else(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temp_dir = tmp_path / "temp"
    temp_dir.mkdir()
    monkeypatch.setenv("TMPDIR", str(temp_dir))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is asked again
    lines: list[str] = []
    paths: list[Path] = []

    def start() -> None:
        paths.append(resolve_model(None, progress=lines.append))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(paths) == 2
    assert len(set(paths)) == 1
    check_model_dir(paths[0])
    assert sum(line.startswith("converting") for line in lines) == 1
    assert list(temp_dir.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_demo_model_knows_the_capital_of_france() -> None:
    transformers = pytest.importorskip("transformers")
    model_dir = resolve_model("demo", progress=ignore)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)

    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer
