"""Help pages: lists of commands with whole sentences."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class WholeSentences(TyperGroup):
    """Commands that lists others with the whole first sentence of each, over several lines where it is long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=10_000)) for name, command in commands if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
