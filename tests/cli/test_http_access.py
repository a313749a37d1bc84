"""Who may reach the HTTP server, from the settings."""

import tomllib

import pytest

from pdserve.cli.errors import SettingError
from pdserve.cli.http_access import admin_keys, api_keys, check_access, http_config, new_api_key
from pdserve.cli.settings import Settings
from pdserve.engine.errors import PdserveError
from pdserve.gateway.tool_parsers import ReasoningParser, ToolCallParser


def test_a_new_key_and_its_entry_fit(tmp_path) -> None:
    secret, entry = new_api_key("team-a")
    path = tmp_path / "keys.toml"
    path.write_text(entry)

    keys = api_keys(Settings(api_keys_file=str(path), requests_per_minute=7))

    found = keys.find(secret.encode())
    assert found is not None and found.name == "team-a" and found.limits.requests_per_minute == 7
    assert secret not in entry and tomllib.loads(entry)["keys"][0]["name"] == "team-a"


def test_two_new_keys_differ_and_a_wrong_name_is_refused() -> None:
    assert new_api_key("a")[0] != new_api_key("a")[0]
    with pytest.raises(SettingError, match="no name for a key"):
        new_api_key('a"\n')


def test_keys_in_clear_open_their_own_door_only() -> None:
    settings = Settings(api_keys=("one",), admin_api_keys=("root",))

    assert api_keys(settings).find(b"one") and not api_keys(settings).find(b"root")
    assert admin_keys(settings).find(b"root") and not admin_keys(settings).find(b"one")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tokens_per_day": 5}, "--api-keys"),
        ({"api_keys_file": "/nowhere/keys.toml"}, "cannot be read"),
        ({"tls_cert_file": "cert.pem"}, "both"),
        ({"tls_cert_file": "/nowhere/c.pem", "tls_key_file": "/nowhere/k.pem"}, "cannot be used"),
    ],
)
def test_what_cannot_work_is_said_at_start(fields: dict, problem: str) -> None:
    with pytest.raises(PdserveError, match=problem):
        check_access(Settings(**fields))


def test_the_parsers_of_calls_and_thoughts_reach_the_gateway() -> None:
    chosen = http_config(Settings(tool_call_parser="mistral", reasoning_parser="think"), "demo")
    default = http_config(Settings(), "demo")

    assert (chosen.tool_call_parser, chosen.reasoning_parser) == (ToolCallParser.MISTRAL, ReasoningParser.THINK)
    assert (default.tool_call_parser, default.reasoning_parser) == (ToolCallParser.AUTO, ReasoningParser.NONE)
