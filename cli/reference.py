"""The reference of all settings as Markdown, for the documentation; a test keeps the two the same."""

from pdserve.cli.parser import default_text
from pdserve.cli.setting_spec import Command, Group
from pdserve.cli.settings import SPECS


def settings_reference() -> str:
    """Return one Markdown table for each group of settings."""
    lines: list[str] = []
    for group in Group:
        lines += [f"### {group[0].upper()}{group[1:]}", ""]
        lines += [
            "| flag | environment | TOML key | value | commands | meaning |",
            "|---|---|---|---|---|---|",
        ]
        for spec in SPECS:
            if spec.group is group:
                default = default_text(spec).removeprefix("default ")
                value = f"{spec.value_type.expects} ({default if default == 'no default' else f'`{default}`'})"
                commands = ", ".join(command for command in Command if command in spec.commands)
                cells = [
                    f"`{spec.flag}`",
                    f"`{spec.environment_name}`",
                    f"`{spec.name}`",
                    value,
                    commands,
                    spec.help,
                ]
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)
