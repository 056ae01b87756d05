"""What groups of commands share: `penstock` itself, and verbs with commands of their own."""

from __future__ import annotations

import difflib

import click

__all__ = ["Group"]


class Group(click.Group):
    """A group of commands whose error for an unknown command lists those that exist."""

    kind = "command"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], names, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"The {self.kind}s are {', '.join(sorted(names))}."
            ctx.fail(f"No such {self.kind} '{args[0]}'. {hint}")
        return super().resolve_command(ctx, args)
