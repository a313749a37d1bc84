"""Resolves settings: flags win over the environment, that over the TOML file, that over defaults.

All is checked before anything starts; what is unknown or wrong is named with its value and the fix.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdserve.cli.errors import SettingError
from pdserve.cli.setting_spec import Command, SettingSpec
from pdserve.cli.settings import SPECS, Settings, specs_of
from pdserve.cli.value_types import SettingValue

CONFIG_ENVIRONMENT_NAME = "PDSERVE_CONFIG"

# Kubernetes puts PDSERVE_<SERVICE>_PORT_... into every pod beside a service that is named pdserve-...
_SERVICE_LINK = re.compile(r"PDSERVE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)|PDSERVE_\w+_PORT")
_BY_NAME = {spec.name: spec for spec in SPECS}


def resolve_settings(
    command: Command, flags: Mapping[str, str], environment: Mapping[str, str], config_path: str | None
) -> Settings:
    """Return the settings of `command`; `flags` are the texts given on the command line, by setting name.

    Raises:
        SettingError: some source has an unknown key or a wrong value.
    """
    _check_environment_names(environment)
    path = config_path or environment.get(CONFIG_ENVIRONMENT_NAME)
    file_values = _read_file(Path(path), command) if path else {}
    values: dict[str, SettingValue] = {}
    for spec in specs_of(command):
        if spec.name in flags:
            values[spec.name] = _parsed(spec, flags[spec.name], spec.flag)
        elif environment.get(spec.environment_name):
            values[spec.name] = _parsed(spec, environment[spec.environment_name], spec.environment_name)
        elif spec.name in file_values:
            values[spec.name] = file_values[spec.name]
    return Settings(**values)  # type: ignore[arg-type]  # each value went through its setting's own parser


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name nearest to `name`, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def _parsed(spec: SettingSpec, raw: object, origin: str) -> SettingValue:
    try:
        return spec.value_type.parse(raw)
    except ValueError:
        shown = "the value" if spec.secret else repr(raw)
        hint = did_you_mean(str(raw), spec.value_type.metavar.split("|")) if "|" in spec.value_type.metavar else ""
        raise SettingError(f"{origin}: {shown} is wrong, it must be {spec.value_type.expects}{hint}") from None


def _check_environment_names(environment: Mapping[str, str]) -> None:
    known = {spec.environment_name for spec in SPECS} | {CONFIG_ENVIRONMENT_NAME}
    for name in sorted(environment):  # its value may be a secret under a mistyped name
        if name.startswith("PDSERVE_") and name not in known and not _SERVICE_LINK.fullmatch(name):
            hint = did_you_mean(name, known) or "; `pdserve config-reference` lists all"
            raise SettingError(f"environment variable {name} is not a setting{hint}")


def _read_file(path: Path, command: Command) -> dict[str, SettingValue]:
    """Return the file's values: its top level, overridden by the table named like the command."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"--config: cannot read {str(path)!r} ({error.strerror}); give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--config: {str(path)!r} is not TOML: {error}") from None
    tables = {name: table for name, table in document.items() if name in set(Command)}
    top_level = {name: value for name, value in document.items() if name not in tables}
    values = _file_values(path, "", top_level, _BY_NAME)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingError(f"{path}: {name} = {table!r} is wrong, [{name}] is a table of settings")
        allowed = {spec.name: spec for spec in specs_of(Command(name))}
        table_values = _file_values(path, f"[{name}] ", table, allowed)
        if name == command:
            values |= table_values
    return values


def _file_values(
    path: Path, prefix: str, table: Mapping[str, object], allowed: Mapping[str, SettingSpec]
) -> dict[str, SettingValue]:
    values = {}
    for key, raw in table.items():
        if key not in allowed:
            hint = did_you_mean(key, allowed) or "; `pdserve config-reference` lists all"
            raise SettingError(f"{path}: {prefix}{key} = {raw!r} is not a setting here{hint}")
        values[key] = _parsed(allowed[key], raw, f"{path}: {prefix}{key}")
    return values
