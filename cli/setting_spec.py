"""What a setting is: the subcommands that take it, its heading, type and help; and how one is declared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from pdserve.cli.value_types import SettingValue, ValueType

T = TypeVar("T")


class Command(StrEnum):
    """The subcommands that take settings."""

    SERVE = "serve"
    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    GENERATE = "generate"
    HEALTH = "health"
    DOCTOR = "doctor"


class Group(StrEnum):
    """The headings of help texts, in their order."""

    MODEL = "model"
    PROCESSES = "processes"
    HTTP = "HTTP"
    ADMISSION = "admission and routing"
    NETWORK = "network between processes"
    ENGINE = "engine (each node)"
    SAMPLING = "sampling"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """What the table says of one setting. Secret values reach child processes by environment only."""

    name: str
    value_type: ValueType
    default: SettingValue
    help: str
    group: Group
    commands: frozenset[Command]
    environment_name: str
    secret: bool

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return "--" + self.name.replace("_", "-")


EVERY = frozenset(Command)
HEALTH = frozenset({Command.HEALTH})
DOCTOR = frozenset({Command.DOCTOR})
LOADING = EVERY - HEALTH - DOCTOR
NODES = frozenset({Command.PREFILL, Command.DECODE})
ENGINES = NODES | {Command.SERVE, Command.GENERATE}
HTTP = frozenset({Command.SERVE, Command.GATEWAY})
CLUSTER = NODES | HTTP
MEMBERS = NODES | HEALTH
SERVE = frozenset({Command.SERVE})
GATEWAY = frozenset({Command.GATEWAY})
GENERATE = frozenset({Command.GENERATE})


def setting(
    default: T,
    value_type: ValueType,
    group: Group,
    commands: frozenset[Command],
    help: str,
    *,
    environment_name: str | None = None,
    secret: bool = False,
) -> T:
    """Return the field of one setting. `secret`: it reaches child processes by environment only."""
    metadata = {
        "default": default,
        "value_type": value_type,
        "group": group,
        "commands": commands,
        "help": help,
        "environment_name": environment_name,
        "secret": secret,
    }
    return field(default=default, metadata=metadata)


def spec_of(name: str, metadata: Mapping[str, Any]) -> SettingSpec:
    """Return what `setting` put into the metadata of the field `name`."""
    return SettingSpec(
        name=name,
        default=metadata["default"],
        value_type=metadata["value_type"],
        help=metadata["help"],
        group=metadata["group"],
        commands=metadata["commands"],
        environment_name=metadata["environment_name"] or f"PDSERVE_{name.upper()}",
        secret=metadata["secret"],
    )
