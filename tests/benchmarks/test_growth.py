"""How steps grow, measured by the benchmark's own functions on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pdserve.engine.config import EngineConfig
from pdserve.engine.engine import Engine


@pytest.fixture
def growth(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("growth")


def test_every_kind_of_sampling_is_measured_and_drawn(
    growth: ModuleType, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    engine = Engine.load(EngineConfig(model_dir=tiny_model(), num_blocks=64, max_num_seqs=4, growth_reserve=0.0))

    cells = [growth.measure(engine, "float32", kind, 4, 100, 5) for kind in growth._KINDS]
    cells += [growth.measure(engine, "float32", "greedy", 1, context, 5) for context in (100, 300)]
    growth.save(tmp_path, cells, growth.markdown(cells))

    assert all(0 < cell.share < 1 and cell.tokens_per_s > 0 for cell in cells)
    usage = engine.pool.usage()
    assert (usage.in_use, usage.in_flight) == (0, 0), "what was measured is freed"
    assert len(json.loads((tmp_path / "growth.json").read_text())) == len(cells)
    assert (tmp_path / "growth.md").read_text().count("\n| float32 |") == len(cells)
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        f"growth-{figure}-by-{over}.svg"
        for figure in ("step-ms", "tokens-per-s", "bookkeeping-ms")
        for over in ("batch", "context")
    }


def test_models_run_as_before_once_their_time_is_counted(growth: ModuleType) -> None:
    run = growth.ModelRunner.run

    with growth.ModelTime.counted():
        assert growth.ModelRunner.run is not run

    assert growth.ModelRunner.run is run
