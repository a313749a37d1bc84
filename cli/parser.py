"""The command line of pdserve: every option of every subcommand comes from the table in `settings.py`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from pdserve.cli.bench import add_bench_options
from pdserve.cli.errors import SettingError
from pdserve.cli.estimate import add_estimate_options
from pdserve.cli.setting_sources import CONFIG_ENVIRONMENT_NAME, did_you_mean
from pdserve.cli.setting_spec import Command, Group, SettingSpec
from pdserve.cli.settings import specs_of

OTHER_COMMANDS = ("models", "keys", "estimate", "bench", "config-reference")

_SUMMARIES = {
    Command.SERVE: "start everything on this machine: Redis, prefill nodes, decode nodes and the gateway",
    Command.GATEWAY: "run one gateway: the OpenAI-compatible HTTP server",
    Command.PREFILL: "run one prefill node: it turns prompts into KV blocks and the first token",
    Command.DECODE: "run one decode node: it receives KV blocks and streams the other tokens",
    Command.GENERATE: "complete prompts in this process, without any server",
    Command.DOCTOR: "prove each link of the KV plane between running nodes: reachable, same keys and model, how fast",
    Command.HEALTH: "ask the nodes of this machine whether they are ready; exit code 0 if all are",
}

_EXAMPLES = {
    Command.SERVE: """\
  pdserve serve                                        the demo model on http://127.0.0.1:8000
  pdserve serve --model ./Llama-3.2-1B --prefill-nodes 2 --decode-nodes 2
  pdserve serve --model model.gguf --port 9000 --host 0.0.0.0
  PDSERVE_PORT=9000 pdserve serve --config pdserve.toml""",
    Command.GATEWAY: """\
  pdserve gateway --model ./Llama-3.2-1B --redis-url redis://10.0.0.1:6379/0 --host 0.0.0.0""",
    Command.PREFILL: """\
  pdserve prefill --model ./Llama-3.2-1B --redis-url redis://10.0.0.1:6379/0 --host 10.0.0.2
  pdserve prefill --host 0.0.0.0 --advertise-host node7.internal""",
    Command.DECODE: """\
  pdserve decode --model ./Llama-3.2-1B --redis-url redis://10.0.0.1:6379/0 --host 10.0.0.3
  pdserve decode --kv-memory 8GiB --max-num-seqs 64""",
    Command.GENERATE: """\
  pdserve generate "What is the capital of France?"
  pdserve generate --no-chat --max-tokens 32 "Once upon a time" "The moon"
  echo "Name three rivers." | pdserve generate --temperature 0.7 --seed 1""",
    Command.DOCTOR: """\
  pdserve doctor --redis-url redis://10.0.0.1:6379/0
  pdserve doctor --json --probe-size 32MiB""",
    Command.HEALTH: """\
  pdserve health --redis-url redis://10.0.0.1:6379/0 --host 10.0.0.3""",
}

_PRECEDENCE = """\
Each option is also an environment variable and a key of the TOML file given by --config:
flags win over the environment, the environment over the file, the file over defaults."""


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """What the command line said: texts as typed, not yet checked against the table."""

    command: str
    flags: dict[str, str]
    config_path: str | None
    prompts: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}; `{self.prog} --help` shows what is possible")


def parse_line(arguments: Sequence[str]) -> ParsedLine:
    """Return what `arguments` say; --help and --version print and exit.

    Raises:
        SettingError: an unknown command or option, or an option without its value.
    """
    names = [*Command, *OTHER_COMMANDS]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        hint = did_you_mean(arguments[0], names) or f"; the commands are {', '.join(names)}"
        raise SettingError(f"{arguments[0]!r} is not a command{hint}")
    parser = build_parser()
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise SettingError(_unknown_option(known.command, unknown[0]))
    fields = vars(known)
    command = fields.pop("command")
    config_path = fields.pop("config", None)
    prompts = tuple(fields.pop("prompts", ()))
    flags = {name: value for name, value in fields.items() if value is not None}
    return ParsedLine(command, flags, config_path, prompts)


def _unknown_option(command: str, option: str) -> str:
    if not option.startswith("-"):
        return f"{option!r}: pdserve {command} takes options only, as --name value"
    given = option.split("=")[0]
    if command not in set(Command):
        return f"{given} is not an option of pdserve {command}"
    flags = [spec.flag for spec in specs_of(Command(command))] + ["--config", "--help"]
    hint = did_you_mean(given, flags) or f"; `pdserve {command} --help` lists all"
    return f"{given} is not an option of pdserve {command}{hint}"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from pdserve import __version__

    parser = _Parser(
        prog="pdserve",
        description="Serve large language models with disaggregated prefill and decode.",
        epilog="Start here:\n  pdserve serve\n\nThen, for one command:\n  pdserve serve --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pdserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in Command:
        _add_command(commands, command)
    models = "fetch: prepare a model for serving (download, convert) and print its directory"
    parser_of_models = commands.add_parser("models", help=models, description=models, allow_abbrev=False)
    parser_of_models.add_argument("action", choices=("fetch",))
    model_help = "hub id, .gguf file, directory, or demo (the default)"
    parser_of_models.add_argument("model", nargs="?", metavar="MODEL", help=model_help)
    keys = (
        "generate FILE: make the file of --transfer-key-file, which all nodes share; a valid one is left as it is. "
        "api NAME: make an API key and print its entry for --api-keys-file"
    )
    parser_of_keys = commands.add_parser("keys", help=keys, description=keys, allow_abbrev=False)
    parser_of_keys.add_argument("action", choices=("generate", "api"))
    name_help = "file to write, readable for its owner only; or whom the API key is for"
    parser_of_keys.add_argument("file", metavar="FILE|NAME", help=name_help)
    add_estimate_options(commands)
    add_bench_options(commands)
    reference = "print every setting as a Markdown table"
    commands.add_parser("config-reference", help=reference, description=reference, allow_abbrev=False)
    return parser


def _add_command(commands: "argparse._SubParsersAction[_Parser]", command: Command) -> None:
    parser = commands.add_parser(
        command,
        help=_SUMMARIES[command],
        description=f"{_SUMMARIES[command][0].upper()}{_SUMMARIES[command][1:]}.",
        epilog=f"examples:\n{_EXAMPLES[command]}\n\n{_PRECEDENCE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command is Command.GENERATE:
        parser.add_argument(
            "prompts",
            nargs="*",
            metavar="PROMPT",
            help="the prompts; without any, each line of standard input",
        )
    config_help = f"TOML file with settings (env {CONFIG_ENVIRONMENT_NAME})"
    parser.add_argument("--config", metavar="FILE", help=config_help)
    specs = specs_of(command)
    for group in Group:
        members = [spec for spec in specs if spec.group is group]
        if members:
            section = parser.add_argument_group(group)
            for spec in members:
                _add_option(section, spec)


def _add_option(section: "argparse._ArgumentGroup", spec: SettingSpec) -> None:
    help_text = f"{spec.help} ({default_text(spec)}; env {spec.environment_name})".replace("%", "%%")
    if spec.value_type.is_switch:
        section.add_argument(spec.flag, dest=spec.name, action="store_const", const="true", help=help_text)
        negative = f"--no-{spec.flag.removeprefix('--')}"
        section.add_argument(negative, dest=spec.name, action="store_const", const="false", help="turn that off")
        return
    section.add_argument(spec.flag, dest=spec.name, metavar=spec.value_type.metavar, help=help_text)


def default_text(spec: SettingSpec) -> str:
    """Return "default X", or "no default" if there is none to name."""
    if spec.default is None or spec.default == ():
        return "no default"
    if spec.value_type.metavar == "SIZE" and isinstance(spec.default, int):
        return f"default {spec.default // 2**20} MiB"
    if isinstance(spec.default, bool):
        return f"default {str(spec.default).lower()}"
    return f"default {spec.default:g}" if isinstance(spec.default, float) else f"default {spec.default}"
