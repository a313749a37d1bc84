"""Ctrl-C ends what the offline engine measures: a part of it would be another figure."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pdserve import LLM

Load = Callable[[str], ModuleType]


@pytest.fixture
def interrupted(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine in whose first step somebody presses Ctrl-C."""
    llm = LLM(str(tiny_model(vocab_size=1_000)), num_blocks=64, max_num_batched_tokens=32)
    step = llm._engine.step

    def press_and_step() -> object:
        monkeypatch.setattr(llm._engine, "step", step)
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm._engine, "step", press_and_step)
    return llm


@pytest.mark.usefixtures("sigint_is_heard")
def test_a_part_of_the_text_has_no_perplexity(load: Load, interrupted: LLM) -> None:
    with pytest.raises(KeyboardInterrupt):
        load("perplexity").perplexity(interrupted, "the cat sat on the mat " * 30, 16, 128)


@pytest.mark.usefixtures("sigint_is_heard")
def test_a_request_cut_short_has_no_rate(load: Load, interrupted: LLM) -> None:
    with pytest.raises(KeyboardInterrupt):
        load("limits")._generate(interrupted, 8, 50)
