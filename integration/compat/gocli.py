"""Read command lines as Go programs do, where click differs.

- A flag without a value also accepts ``--flag=true`` and ``--flag=false``.
- ``-flag`` means ``--flag``.
- A repeatable flag takes a comma-separated list each time, and one from its environment variable.

Source: github.com/urfave/cli, Go's package flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from hooks.schema import FALSE, TRUE


class GoCommand(click.Command):
    """A command that accepts flags in Go's syntax."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Normalize the arguments to click's syntax and parse them."""
        off: set[str] = set()
        rest = super().parse_args(ctx, list(_normal(self, ctx, args, off)))
        # A flag with =false is off even if its environment variable is set.
        ctx.params.update(dict.fromkeys(off & ctx.params.keys(), False))
        return rest


class GoGroup(GoCommand, click.Group):
    """A group that accepts flags in Go's syntax, and whose commands do too."""

    command_class = GoCommand
    group_class = type


class Several(click.Option):
    """A repeatable flag whose values are comma-separated lists."""

    def __init__(self, names: Sequence[str], **more: Any) -> None:
        super().__init__(names, multiple=True, callback=flatten, **more)

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """Return the environment variable unsplit; click would split it at blanks."""
        text = self.resolve_envvar_value(ctx)
        return None if text is None else [text]


def flatten(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Split comma-separated values; a callback for click options."""
    del ctx, param
    items = (item.strip() for each in value for item in each.split(","))
    return tuple(item for item in items if item)


def _normal(
    command: click.Command, ctx: click.Context, args: list[str], off: set[str]
) -> Iterator[str]:
    """Yield the arguments in click's syntax; those after a subcommand's name stay as they are.

    Args:
        command: has the flags.
        ctx: its context.
        args: in Go's syntax.
        off: receives the parameters of the flags that end up as false.
    """
    names = {name: param for param in command.get_params(ctx) for name in param.opts}
    words = iter(args)
    for word in words:
        if word == "--" or not word.startswith("-") or word == "-":
            yield word
            yield from words
            return
        name, equals, value = word.partition("=")
        if not name.startswith("--") and f"-{name}" in names:
            name = f"-{name}"
        option = names.get(name)
        if not isinstance(option, click.Option):
            yield word
        elif not option.is_flag:
            yield name
            yield from [value] if equals else _next(words)
        elif not equals or value in TRUE:
            off.discard(option.name or "")
            yield name
        elif value in FALSE:
            off.add(option.name or "")
        else:
            raise click.BadParameter(f"{value!r} is neither true nor false", param=option)


def _next(words: Iterator[str]) -> Iterator[str]:
    word = next(words, None)
    if word is not None:
        yield word
