"""What users of vLLM write for speculation, read or refused with the name of what is wrong."""

from typing import Any

import pytest

from pdserve.engine.config import EngineConfig
from pdserve.engine.errors import InvalidRequest
from pdserve.engine.speculative_config import SpeculativeConfig, SpeculativeMethod


def test_both_methods_are_read() -> None:
    ngram = SpeculativeConfig.from_json(
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2}'
    )
    draft = SpeculativeConfig.from_json('{"model": "some/dir", "num_speculative_tokens": 5}')

    assert (ngram.method, ngram.num_speculative_tokens, ngram.prompt_lookup_max) == (SpeculativeMethod.NGRAM, 3, 5)
    assert (draft.method, draft.model) == (SpeculativeMethod.DRAFT_MODEL, "some/dir")


def test_the_shortest_match_follows_the_longest_where_only_that_is_given() -> None:
    config = SpeculativeConfig.from_mapping({"num_speculative_tokens": 1, "prompt_lookup_max": 1})

    assert config.prompt_lookup_min == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[1]", "JSON object"),
        ("{", "not JSON"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens"),
        ('{"num_speculative_tokens": 4, "method": "medusa"}', "medusa"),
        ('{"num_speculative_tokens": 4, "method": ["ngram"]}', "ngram"),
        ('{"num_speculative_tokens": 4, "method": "draft_model"}', "model"),
        ('{"num_speculative_tokens": 4, "method": "ngram", "model": "x"}', "model"),
        ('{"num_speculative_tokens": 4, "model": 3}', "model"),
        ('{"num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 3}', "prompt_lookup_min"),
        ('{"num_speculative_tokens": 4, "prompt_lookup_max": "3"}', "prompt_lookup_max"),
        ('{"num_speculative_tokens": 4, "tokens": 3}', "'tokens'"),
        ('{"num_speculative_tokens": 4, "adaptive": 1}', "adaptive"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        SpeculativeConfig.from_json(given)

    assert caught.value.field == "speculative_config"


def test_an_engine_config_takes_a_mapping(tmp_path: Any) -> None:
    options: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": 2}}

    assert EngineConfig(model_dir=tmp_path, **options).speculative_config == SpeculativeConfig(num_speculative_tokens=2)
