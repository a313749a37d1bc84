"""Settings: one table, four sources in a fixed order, and errors that name key, value and fix."""

from pathlib import Path

import pytest

from pdserve.cli.errors import SettingError
from pdserve.cli.parser import parse_line
from pdserve.cli.reference import settings_reference
from pdserve.cli.setting_sources import resolve_settings
from pdserve.cli.setting_spec import Command
from pdserve.cli.settings import SPECS, Settings, specs_of


def resolve(*arguments: str, environment: dict[str, str] | None = None, command: Command = Command.SERVE) -> Settings:
    line = parse_line([command, *arguments])
    return resolve_settings(command, line.flags, environment or {}, line.config_path)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "pdserve.toml"
    path.write_text('port = 3\nlog_level = "debug"\nhost = "::1"\n[gateway]\nport = 4\n')
    return path


def test_defaults_are_the_tables() -> None:
    assert resolve() == Settings()


def test_flag_wins_over_environment_over_file_over_default(config_file: Path) -> None:
    environment = {"PDSERVE_PORT": "2", "PDSERVE_LOG_LEVEL": "warning"}

    settings = resolve("--config", str(config_file), "--port", "1", environment=environment)

    assert (settings.port, settings.log_level, settings.host) == (1, "warning", "::1")
    assert settings.decode_nodes == Settings().decode_nodes


def test_table_of_the_command_wins_over_the_top_level(config_file: Path) -> None:
    environment = {"PDSERVE_CONFIG": str(config_file)}

    assert resolve(environment=environment, command=Command.GATEWAY).port == 4
    assert resolve(environment=environment).port == 3


def test_empty_environment_variable_is_not_set() -> None:
    assert resolve(environment={"PDSERVE_PORT": ""}).port == Settings().port


def test_redis_url_has_its_usual_name() -> None:
    assert resolve(environment={"REDIS_URL": "redis://there"}).redis_url == "redis://there"


@pytest.mark.parametrize(
    ("arguments", "attribute", "value"),
    [
        (["--kv-memory", "1.5GiB"], "kv_memory", 3 * 2**29),
        (["--kv-memory", "512m"], "kv_memory", 2**29),
        (["--kv-memory=1048576"], "kv_memory", 2**20),
        (["--no-prefix-cache"], "prefix_cache", False),
        (["--start-timeout-s", "1.5"], "start_timeout_s", 1.5),
        (["--api-keys", "a, b"], "api_keys", ("a", "b")),
        (["--prefill-nodes", "0"], "prefill_nodes", 0),
    ],
)
def test_text_becomes_a_value(arguments: list[str], attribute: str, value: object) -> None:
    assert getattr(resolve(*arguments), attribute) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "http"], r"--port: 'http' is wrong, it must be a whole number between 0 and 65535"),
        (["--port", "65536"], "--port: '65536' is wrong"),
        (["--port", "1.5"], "--port: '1.5' is wrong"),
        (["--decode-nodes", "0"], "--decode-nodes: '0' is wrong, it must be a whole number between 1"),
        (["--dtype", "flaot32"], "must be one of float32, .*did you mean float32"),
        (["--kv-memory", "2 parsecs"], "must be a size such as 2GiB"),
        (["--start-timeout-s", "nan"], "must be a number between"),
        (["--host", ""], "must be a non-empty text"),
        (["--prot", "1"], r"--prot is not an option of pdserve serve; did you mean --port\?"),
        (["--port"], "--port: expected one argument"),
        (["8000"], "takes options only"),
        (["--advertise-host", "x"], "--advertise-host is not an option of pdserve serve"),
    ],
)
def test_wrong_flag_is_named_with_its_fix(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resolve(*arguments)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PDSERVE_PORT": "x"}, "PDSERVE_PORT: 'x' is wrong"),
        ({"PDSERVE_PROT": "1"}, r"variable PDSERVE_PROT is not a setting; did you mean PDSERVE_PORT\?"),
    ],
)
def test_wrong_variable_is_named_with_its_fix(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resolve(environment=environment)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1",
        "127.0.0.1:6379",
        "redis://",
        "memory",
        "redis://localhost:notaport",
        "redis+sentinel://host",
        "redis+sentinel://host:x/service",
    ],
)
def test_wrong_redis_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(SettingError, match="REDIS_URL: the value is wrong, it must be a URL that begins") as error:
        resolve(environment={"REDIS_URL": f"{url}"})

    assert "127.0.0.1" not in str(error.value)


def test_wrong_namespace_is_refused() -> None:
    with pytest.raises(SettingError, match="--namespace: 'a:b' is wrong, it must be 1 to 64 letters"):
        resolve("--namespace", "a:b", command=Command.DECODE)


def test_variables_of_a_kubernetes_service_are_left_alone() -> None:
    environment = {
        "PDSERVE_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "PDSERVE_GATEWAY_SERVICE_PORT_HTTP": "80",
        "PDSERVE_GATEWAY_PORT": "tcp://10.0.0.1:80",
        "PDSERVE_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
    }

    assert resolve(environment=environment) == Settings()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("prot = 1", r"prot = 1 is not a setting here; did you mean port\?"),
        ("port = true", "port: True is wrong"),
        ("port = [1]", r"port: \[1\] is wrong"),
        ("[gateway]\ndecode_nodes = 1", r"\[gateway\] decode_nodes = 1 is not a setting here"),
        ("gateway = 1", r"\[gateway\] is a table of settings"),
        ("port = ", "is not TOML"),
    ],
)
def test_wrong_file_is_named_with_its_fix(tmp_path: Path, document: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(document)

    with pytest.raises(SettingError, match=message):
        resolve("--config", str(path))


def test_missing_file_is_named() -> None:
    with pytest.raises(SettingError, match=r"--config: cannot read '/no/such\.toml' \(No such file"):
        resolve("--config", "/no/such.toml")


def test_secret_is_not_shown_by_its_error(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("api_keys = [12345]")

    with pytest.raises(SettingError) as error:
        resolve("--config", str(path))

    assert "12345" not in str(error.value)


def test_unknown_command_is_named() -> None:
    with pytest.raises(SettingError, match=r"'serv' is not a command; did you mean serve\?"):
        parse_line(["serv"])


def test_prompts_are_what_is_no_option() -> None:
    line = parse_line(["generate", "--seed", "1", "one", "two words"])

    assert line.prompts == ("one", "two words")
    assert line.flags == {"seed": "1"}


def test_every_setting_is_in_the_reference_and_has_a_command() -> None:
    reference = settings_reference()

    for spec in SPECS:
        assert f"| `{spec.flag}` | `{spec.environment_name}` | `{spec.name}` |" in reference
        assert spec.commands


@pytest.mark.parametrize("command", list(Command))
def test_help_names_every_option_with_default_and_variable(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_line([command, "--help"])

    help_text = " ".join(capsys.readouterr().out.split())
    assert exit_.value.code == 0
    assert "examples:" in help_text
    for spec in specs_of(command):
        assert spec.flag in help_text
        assert f"env {spec.environment_name})" in help_text
