"""``nvshim compat nvidia-ctk``: what people script of it."""

from __future__ import annotations

import importlib
from typing import Final

import click

from integration.cli.nvidia_ctk.given import Given
from integration.compat.gocli import GoGroup

__all__ = ["command"]

_GROUPS: Final = ("cdi", "config", "runtime", "system")


class _Lazy(GoGroup):
    """A group whose larger parts are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the help."""
        return [*_GROUPS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of them, which is imported."""
        if cmd_name not in _GROUPS:
            return super().get_command(ctx, cmd_name)
        found = importlib.import_module(f"{__name__}.{cmd_name}").command
        return found if isinstance(found, click.Command) else None


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001, FBT001 - click's signature
    if not value or ctx.resilient_parsing:
        return
    from integration.compat import COMPATIBLE_WITH  # noqa: PLC0415 - one question in a hundred
    from shim import VERSION  # noqa: PLC0415

    click.echo(f"NVIDIA Container Toolkit CLI version {COMPATIBLE_WITH}")
    click.echo(f"commit: nvshim-{VERSION}")
    ctx.exit()


@click.group("nvidia-ctk", cls=_Lazy)
@click.option("-d", "--debug", is_flag=True, envvar="NVIDIA_CTK_DEBUG", help="Tell more.")
@click.option("--quiet", is_flag=True, envvar="NVIDIA_CTK_QUIET", help="Tell warnings only.")
@click.option("--config", "config_file", metavar="FILE",
              help="NVIDIA's config.toml, in place of this node's configuration.")  # fmt: skip
@click.option(
    "-v", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Say which version this is.",
)  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, *, debug: bool, quiet: bool, config_file: str | None) -> None:
    """Do what nvidia-ctk does, without hooks."""
    ctx.obj = Given(config_file)
    ctx.obj.stderr.debugging, ctx.obj.stderr.quiet = debug, quiet


@command.command("hook", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def hook(words: tuple[str, ...]) -> None:
    """Has no counterpart: the shim does what hooks did before the container is made."""
    from integration.compat.errors import NoCounterpart  # noqa: PLC0415 - as above

    raise NoCounterpart(
        f"nvidia-ctk hook {' '.join(words)}".rstrip(),
        found="the shim does what hooks did before the container is made",
        do="write the CDI spec without hooks: nvshim cdi generate",
    )


@command.command("info")
def info() -> None:
    """Provide information about the system; the original says nothing either."""
