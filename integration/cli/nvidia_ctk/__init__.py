"""``nvshim compat nvidia-ctk``: the commands that scripts use."""

from __future__ import annotations

import click

from integration.cli.lazy import LazyGroup
from integration.cli.nvidia_ctk.global_flags import GlobalFlags
from integration.cli.options import version_option
from integration.compat import COMPATIBLE_WITH
from integration.compat.errors import NoCounterpart
from integration.compat.gocli import GoGroup
from shim import VERSION

__all__ = ["command"]

_GROUPS = {name: f"{__name__}.{name}" for name in ("cdi", "config", "runtime", "system")}


class _Group(LazyGroup, GoGroup):
    """A group of lazily imported commands with Go's flag syntax."""


def _version() -> str:
    return f"NVIDIA Container Toolkit CLI version {COMPATIBLE_WITH}\ncommit: nvshim-{VERSION}"


@click.group("nvidia-ctk", cls=_Group, modules=_GROUPS)
@click.option("-d", "--debug", is_flag=True, envvar="NVIDIA_CTK_DEBUG", help="Log debug messages.")
@click.option("--quiet", is_flag=True, envvar="NVIDIA_CTK_QUIET", help="Log only warnings.")
@click.option("--config", "config_file", metavar="FILE",
              help="Use NVIDIA's config.toml from this file instead of the node's "
              "configuration.")  # fmt: skip
@version_option("-v", "--version", text=_version)
@click.pass_context
def command(ctx: click.Context, /, *, debug: bool, quiet: bool, config_file: str | None) -> None:
    """Act as nvidia-ctk, without hooks."""
    ctx.obj = GlobalFlags(config_file)
    ctx.obj.stderr.debugging, ctx.obj.stderr.quiet = debug, quiet


@command.command("hook", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def hook(words: tuple[str, ...]) -> None:
    """Not supported: the shim does a hook's work before the container is created."""
    raise NoCounterpart(
        f"nvidia-ctk hook {' '.join(words)}".rstrip(),
        found="the shim does a hook's work before the container is created",
        do="generate a CDI spec without hooks: nvshim cdi generate",
    )


@command.command("info")
def info() -> None:
    """Provide information about the system; like the original, print nothing."""
