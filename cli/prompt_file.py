"""Files of prompts and of their answers, one JSON object a line, such that a killed run can go on.

An answer is appended by a single write and names its line of the input, with a digest of it: what is there is done,
a torn last line is cut off, and answers to another input are noticed.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from pdserve.cli.errors import SettingError
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.sampling_params import SamplingParams
from pdserve.engine.structured_outputs import StructuredOutputsParams

_NAMES = ("id", "custom_id")
_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING = frozenset(field.name for field in fields(SamplingParams)) - {"bad_words_ids"}


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of the input, its number counted from 1."""

    number: int
    text: str

    @property
    def digest(self) -> str:
        """What tells this line from another one of the same number."""
        return hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()

    def fields(self) -> dict[str, Any]:
        """Return what the line says, a bare text as `prompt`.

        Raises:
            InvalidRequest: it is neither a text nor an object with one prompt, or has a field that nobody knows.
        """
        try:
            value = orjson.loads(self.text)  # strict: no NaN, no half of a surrogate pair, no bottomless nesting
        except orjson.JSONDecodeError as error:
            raise InvalidRequest("line", f"not valid JSON ({error})") from error
        value = {"prompt": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise InvalidRequest("line", "must be a text or an object")
        if unknown := sorted(value.keys() - {*_NAMES, *_PROMPTS} - _SAMPLING):
            raise InvalidRequest(unknown[0], "not a field of a line")
        if sum(name in value for name in _PROMPTS) != 1:
            raise InvalidRequest("prompt", f"give one of {', '.join(_PROMPTS)}")
        return value


def sampling_of(line: Mapping[str, Any], default: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling of a line: its own words over `default`.

    Raises:
        InvalidRequest: a value is wrong.
    """
    own = {name: value for name, value in line.items() if name in _SAMPLING}
    try:
        if isinstance(own.get("logit_bias"), dict):  # JSON has no other keys than texts
            own["logit_bias"] = {int(token_id): bias for token_id, bias in own["logit_bias"].items()}
        if isinstance(own.get("structured_outputs"), dict):
            own["structured_outputs"] = StructuredOutputsParams(**own["structured_outputs"])
        return SamplingParams(**{**default, **own})
    except InvalidRequest:
        raise
    except (TypeError, AttributeError, ValueError) as error:
        raise InvalidRequest("sampling", f"a value has the wrong type ({error})") from error


def read_prompts(path: Path) -> Iterator[PromptLine]:
    """Yield the lines that are not empty."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if text := line.strip():
                yield PromptLine(number, text)


class AnswerFile:
    """The output of a run, held by one process at a time."""

    def __init__(self, descriptor: int, digest_by_line: dict[int, str]) -> None:
        self._descriptor = descriptor
        self._digest_by_line = digest_by_line

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["AnswerFile"]:
        """Open it, or make it, and read what is there.

        Raises:
            SettingError: another process writes it, or it holds something else than answers.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SettingError(f"--output: {path} is being written by another process") from None
            yield cls(descriptor, _read_answers(path, descriptor))
        finally:
            os.close(descriptor)

    def has(self, line: PromptLine) -> bool:
        """Return whether the line is answered.

        Raises:
            SettingError: its number is, but for another text.
        """
        digest = self._digest_by_line.get(line.number)
        if digest is not None and digest != line.digest:
            raise SettingError(
                f"--output: line {line.number} is answered there, but for another --input; name a new file"
            )
        return digest is not None

    def add(self, line: PromptLine, answer: Mapping[str, Any]) -> None:
        """Append the answer of a line: whole or, if the disk is full, cut off at the next start."""
        entry = {"line": line.number, "digest": line.digest, **answer}
        rest = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        while rest:  # a disk that is nearly full takes a part, and says at the next call that it is full
            rest = rest[os.write(self._descriptor, rest) :]


def _read_answers(path: Path, descriptor: int) -> dict[int, str]:
    digest_by_line: dict[int, str] = {}
    with path.open("rb") as file:
        end = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                os.ftruncate(descriptor, end)
                break
            end += len(raw)
            try:
                entry = json.loads(raw)
                digest_by_line[int(entry["line"])] = str(entry["digest"])
            except (ValueError, KeyError, TypeError):
                raise SettingError(f"--output: {path} holds something else than answers; name a new file") from None
    return digest_by_line
