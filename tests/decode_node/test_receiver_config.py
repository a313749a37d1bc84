"""Both planes of a node: with the keys it was given, or in the clear with a word about it."""

from pathlib import Path

import pytest

from pdserve.control.node_config import NodeConfig
from pdserve.control.node_process import warn_if_open
from pdserve.decode_node.config import DecodeNodeConfig
from pdserve.decode_node.process import receiver_config
from pdserve.engine.config import EngineConfig
from pdserve.kvtransfer.curve_keys import CurveKeys, generate_keys

KEYS = generate_keys()


def node(host: str, keys: CurveKeys | None) -> DecodeNodeConfig:
    place = NodeConfig(node_id="node", redis_url="redis://unused", host=host, keys=keys)
    return DecodeNodeConfig(node=place, engine=EngineConfig(model_dir=Path("unused")))


@pytest.mark.parametrize(
    ("host", "keys", "num_warnings"),
    [
        ("127.0.0.1", None, 0),
        ("::1", None, 0),
        ("localhost", None, 0),
        ("0.0.0.0", None, 1),
        ("10.0.0.7", None, 1),
        ("0.0.0.0", KEYS, 0),
    ],
)
def test_only_plaintext_beyond_loopback_is_warned_of(
    caplog: pytest.LogCaptureFixture, host: str, keys: CurveKeys | None, num_warnings: int
) -> None:
    warn_if_open(node(host, keys).node)

    assert [record.levelname for record in caplog.records] == ["WARNING"] * num_warnings


@pytest.mark.parametrize("keys", [None, KEYS])
def test_the_receiver_has_the_keys_of_the_node(keys: CurveKeys | None) -> None:
    config = receiver_config(node("0.0.0.0", keys))

    assert (config.curve, config.allow_plaintext) == (keys, keys is None)


def test_keys_are_not_shown() -> None:
    config = node("0.0.0.0", KEYS)

    assert KEYS.secret_key not in repr(config) + repr(receiver_config(config))
