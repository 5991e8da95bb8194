"""``nvshim compat nvidia-ctk``: what people script of it."""

from __future__ import annotations

import click

from integration.cli.lazy import LazyGroup
from integration.cli.nvidia_ctk.given import Given
from integration.cli.options import version_option
from integration.compat import COMPATIBLE_WITH
from integration.compat.errors import NoCounterpart
from integration.compat.gocli import GoGroup
from shim import VERSION

__all__ = ["command"]

_GROUPS = {name: f"{__name__}.{name}" for name in ("cdi", "config", "runtime", "system")}


class _Group(LazyGroup, GoGroup):
    """A group of these, written as Go programs allow."""


def _version() -> str:
    return f"NVIDIA Container Toolkit CLI version {COMPATIBLE_WITH}\ncommit: nvshim-{VERSION}"


@click.group("nvidia-ctk", cls=_Group, modules=_GROUPS)
@click.option("-d", "--debug", is_flag=True, envvar="NVIDIA_CTK_DEBUG", help="Tell more.")
@click.option("--quiet", is_flag=True, envvar="NVIDIA_CTK_QUIET", help="Tell warnings only.")
@click.option("--config", "config_file", metavar="FILE",
              help="NVIDIA's config.toml, in place of this node's configuration.")  # fmt: skip
@version_option("-v", "--version", tell=_version)
@click.pass_context
def command(ctx: click.Context, /, *, debug: bool, quiet: bool, config_file: str | None) -> None:
    """Do what nvidia-ctk does, without hooks."""
    ctx.obj = Given(config_file)
    ctx.obj.stderr.debugging, ctx.obj.stderr.quiet = debug, quiet


@command.command("hook", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def hook(words: tuple[str, ...]) -> None:
    """Has no counterpart: the shim does what hooks did before the container is made."""
    raise NoCounterpart(
        f"nvidia-ctk hook {' '.join(words)}".rstrip(),
        found="the shim does what hooks did before the container is made",
        do="write the CDI spec without hooks: nvshim cdi generate",
    )


@command.command("info")
def info() -> None:
    """Provide information about the system; the original says nothing either."""
