"""Measures what structured outputs cost: compiling a form, and a mask for each token, for llguidance and for xgrammar.

    python benchmarks/grammars.py [--model DIRECTORY] [--answers 5]

xgrammar takes part if it is installed (it is no dependency). Both take turns on the same forms in
one process, on random walks through the allowed tokens. Answers are checked by jsonschema: a keyword that a library
neither enforces nor refuses shows as wrong answers.
"""

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
from amounts import above_zero

from pdserve.engine.errors import GrammarFailed
from pdserve.engine.grammar_compiler import GrammarCompiler
from pdserve.engine.grammar_state import GrammarState
from pdserve.engine.model_source import resolve_model
from pdserve.engine.structured_outputs import StructuredOutputsParams
from pdserve.engine.tokenizer import Tokenizer

_MAX_TOKENS = 80
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_NODE = {
    "type": "object",
    "properties": {"v": {"type": "boolean"}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}},
    "required": ["v", "c"],
    "additionalProperties": False,
}
_SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
_SCHEMAS: dict[str, Any] = {
    "person": _PERSON,
    "recursive $ref": {"$defs": {"n": _NODE}, "$ref": "#/$defs/n"},
    "enum of 1,000": {"enum": [f"value {number}" for number in range(1000)]},
    "anyOf": {"anyOf": [_PERSON, {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}]},
    "uniqueItems": {"type": "array", "items": _SMALL, "minItems": 4, "maxItems": 5, "uniqueItems": True},
    "not": {"allOf": [_SMALL, {"not": {"const": 3}}]},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    "if/then": {"if": {"type": "integer"}, "then": {"minimum": 5}, "type": "integer", "maximum": 9},
    "minProperties": {"type": "object", "additionalProperties": _SMALL, "minProperties": 2, "maxProperties": 2},
    "unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 3},
}


class Walker(Protocol):
    """One answer on its way through a grammar."""

    def mask(self) -> bytes:
        """Return one bit a token id."""

    def accept(self, token_id: int) -> None:
        """Go on."""


@dataclass
class Tally:
    """What one library did with one form."""

    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)
    num_right: int = 0
    num_wrong: int = 0
    refusal: str = ""

    def row(self) -> str:
        if self.refusal:
            return f"refused: {self.refusal[:40]}"
        masks = f"{1e6 * statistics.mean(self.mask_s):.0f} us a mask (max {1e3 * max(self.mask_s):.1f} ms)"
        return (
            f"{1e3 * statistics.median(self.compile_s):.1f} ms, {masks}, {self.num_right} right, {self.num_wrong} wrong"
        )


def walk(walker: Walker, eos_id: int, seed: int, mask_s: list[float]) -> list[int] | None:
    """Return the tokens of a random answer, None if it has no end within the limit."""
    choose, token_ids = random.Random(seed), []
    for _ in range(_MAX_TOKENS):
        started = time.perf_counter()
        mask = walker.mask()
        mask_s.append(time.perf_counter() - started)
        ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        if eos_id in ids:
            return token_ids
        token_ids.append(int(choose.choice(ids)))
        walker.accept(token_ids[-1])
    return None


def measure(
    compile_form: Callable[[], Callable[[], Walker]], schema: Any, tokenizer: Tokenizer, num_answers: int, tally: Tally
) -> None:
    """Compile once, then walk through `num_answers` answers and check them."""
    started = time.perf_counter()
    try:
        new_walker = compile_form()
    except (GrammarFailed, RuntimeError, ValueError) as error:
        tally.refusal = str(error).splitlines()[0] if str(error) else type(error).__name__
        return
    tally.compile_s.append(time.perf_counter() - started)
    for seed in range(num_answers):
        token_ids = walk(new_walker(), min(tokenizer.eos_token_ids), seed, tally.mask_s)
        if token_ids is not None:
            is_right = jsonschema.Draft202012Validator(schema).is_valid(json.loads(tokenizer.decode(token_ids)))
            tally.num_right += is_right
            tally.num_wrong += not is_right


def llguidance(tokenizer: Tokenizer) -> Callable[[Any], Callable[[], GrammarState]]:
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    compiler.state(StructuredOutputsParams(choice=("a",)))  # makes the trie of the vocabulary

    def compile_schema(schema: Any) -> Callable[[], GrammarState]:
        params = StructuredOutputsParams(json=schema)
        compiler.drop(params)
        return compiler.state(params).fork

    return compile_schema


class XGrammarWalker:
    def __init__(self, matcher: Any, bitmask: Any) -> None:
        self._matcher, self._bitmask = matcher, bitmask

    def mask(self) -> bytes:
        self._matcher.fill_next_token_bitmask(self._bitmask)
        mask: bytes = self._bitmask.numpy().tobytes()
        return mask

    def accept(self, token_id: int) -> None:
        self._matcher.accept_token(token_id)


def xgrammar(tokenizer: Tokenizer) -> Callable[[Any], Callable[[], XGrammarWalker]]:
    library = importlib.import_module("xgrammar")
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    eos_ids = sorted(tokenizer.eos_token_ids)
    vocabulary = library.TokenizerInfo(tokens, library.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=eos_ids)
    compiler = library.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def compile_schema(schema: Any) -> Callable[[], XGrammarWalker]:
        grammar = compiler.compile_json_schema(json.dumps(schema))
        bitmask = library.allocate_token_bitmask(1, len(tokens))
        return lambda: XGrammarWalker(library.GrammarMatcher(grammar), bitmask)

    return compile_schema


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory with a tokenizer.json; the demo model without")
    parser.add_argument("--answers", type=above_zero(int), default=5)
    options = parser.parse_args(arguments)
    folder = Path(options.model) if options.model else resolve_model(None, progress=print)
    tokenizer = Tokenizer.load(folder)
    libraries: dict[str, Callable[[Any], Callable[[], Walker]]] = {"llguidance": llguidance(tokenizer)}
    if importlib.util.find_spec("xgrammar") is not None:
        libraries["xgrammar"] = xgrammar(tokenizer)
    for name, schema in _SCHEMAS.items():
        tallies = {library: Tally() for library in libraries}
        for _ in range(3):
            for library, compile_schema in libraries.items():
                measure(lambda: compile_schema(schema), schema, tokenizer, options.answers, tallies[library])  # noqa: B023
        for library, tally in tallies.items():
            print(f"{name:16} {library:12} {tally.row()}", flush=True)


if __name__ == "__main__":
    main()
