"""Options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import click

from integration import exits
from integration.cli.errors import FileUnusable
from integration.cli.kinds import KINDS
from integration.cli.output import Format, Output

R = TypeVar("R")

_SINGLE_FORMATS: Final = (Format.TABLE, Format.JSON, Format.YAML)


def stacked(*options: Callable[[Any], Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Combine several options into one decorator; the help lists them in this order."""

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def completing(
    words: Callable[[Mapping[str, Any]], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a completion callback for an option or argument; upper and lower case are equal.

    Args:
        words: returns all candidates from the values of the other parameters.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        del param
        start = incomplete.lower()
        return [word for word in words(ctx.params) if word.lower().startswith(start)]

    return complete


def found_if(found: object) -> None:
    """Exit with status 3 if something was found."""
    if found:
        click.get_current_context().exit(exits.FOUND)


class DirectoryPath(click.Path):
    """The path of a directory, which may be missing: click itself also accepts pipes and devices.

    Args:
        exists: whether it must exist.
    """

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(exists=exists)
        self.name = "directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the path; one that the caller may not look at is left to the command.

        Raises:
            FileUnusable: it is not a directory, or not a path.
        """
        path = super().convert(value, param, ctx)
        if not path:
            self.fail("An empty path.", param, ctx)
        try:
            seen = os.stat(path)
        except (FileNotFoundError, PermissionError):
            return path
        except OSError as error:
            found = os.strerror(error.errno or 0)
        else:
            if stat.S_ISDIR(seen.st_mode):
                return path
            found = os.strerror(errno.ENOTDIR)
        raise FileUnusable(f"to use {os.fsdecode(path)}", found=found.lower())


def not_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty text, which is often an unset variable of a script."""
    if value == "":
        raise click.BadParameter("An empty path.", ctx, param)
    return value


def choose_form(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Report errors in the format of the output, also those of the other options."""
    del param
    if value is not None:
        ctx.find_root().meta["nvshim.format"] = Format(value)
    return value


def with_output(command: Callable[..., R]) -> Callable[..., R]:
    """Add ``-o/--output table|json|yaml`` to a command, which gets an :class:`Output` first."""
    return _with_output(command, _SINGLE_FORMATS)


def with_listing(command: Callable[..., R]) -> Callable[..., R]:
    """Add ``-o table|wide|json|yaml|name``, ``-q`` and ``--no-headers`` to a command that lists.

    Args:
        command: the command's function; it gets an :class:`Output` first.
    """
    quiet = click.option("-q", "--quiet", is_flag=True, help="Print only names, as -o name does.")
    bare = click.option("--no-headers", "bare", is_flag=True, help="Print no column titles.")
    return quiet(bare(_with_output(command, tuple(Format))))


def _with_output(command: Callable[..., R], forms: tuple[Format, ...]) -> Callable[..., R]:
    @click.option(
        "-o", "--output", "form", type=click.Choice([form.value for form in forms]),
        default=Format.TABLE.value, show_default=True, help="The output format.",
        is_eager=True, callback=choose_form,
    )  # fmt: skip
    @functools.wraps(command)
    def answer(*args: Any, form: str, quiet: bool = False, bare: bool = False, **kwargs: Any) -> R:
        context = click.get_current_context()
        chosen = Format.NAME if quiet else Format(form)
        context.find_root().meta["nvshim.format"] = chosen
        words = context.command_path.partition(" ")[2]
        output = Output(chosen, kind=KINDS.get(words, "Answer"), headers=not bare)
        return command(output, *args, **kwargs)

    return answer


def configured(command: Callable[..., R]) -> Callable[..., R]:
    """Add ``--config FILE`` to a command, which gets the :class:`~hooks.config.Config` first.

    Below :func:`with_output` the configuration comes second, after the :class:`Output`.
    """
    return _configured(command, "")


def configured_for(option: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Like :func:`configured`, for a command that needs the configuration for one option only.

    Without that option the command gets None, and works with an invalid configuration.

    Args:
        option: the name of the command's parameter.
    """
    return functools.partial(_configured, option=option)


def _configured(command: Callable[..., R], option: str) -> Callable[..., R]:
    @click.option(
        "--config", "config_path", metavar="FILE", type=click.Path(dir_okay=False),
        callback=not_empty, help="Use this configuration file instead of the node's.",
    )  # fmt: skip
    @functools.wraps(command)
    def answer(*args: Any, config_path: str | None, **kwargs: Any) -> R:
        from hooks.config import load_config  # noqa: PLC0415 - nvshim --help does not need it

        config = load_config(config_path) if kwargs.get(option, True) else None
        return command(*args, config, **kwargs)

    return answer


located = stacked(
    click.option(
        "--containerd-state", "states", metavar="DIR", multiple=True,
        envvar="NVSHIM_CONTAINERD_STATE", type=DirectoryPath(),
        help="containerd's state directory; repeatable.  [default: those of distribution packages,"
        " Docker, k3s, k0s and MicroK8s, and those of running shims]",
    ),
    click.option(
        "--procfs", "proc", metavar="DIR", default="/proc", show_default=True,
        type=DirectoryPath(exists=True), help="The procfs of the node.",
    ),
)  # fmt: skip
"""Adds the parameters ``states``, which may be empty, and ``proc``."""


_POD_RESOURCES: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"

pod_resources_option = click.option(
    "--pod-resources", metavar="SOCKET", default=_POD_RESOURCES, show_default=True,
    type=click.Path(dir_okay=False),
    help="The kubelet's socket that lists the devices of pods; not used if it does not exist.",
)  # fmt: skip


holding = stacked(
    click.option("--stale", is_flag=True, help="Show only containers with an outdated driver."),
    click.option(
        "--orphans",
        is_flag=True,
        help="Show only running containers without a shim, or unknown to the kubelet.",
    ),
    pod_resources_option,
)
"""The options of commands that list the holders of devices."""


def version_option(
    *names: str, text: Callable[[], str]
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Add a flag that prints the version and exits."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's signature
        del param
        if value and not ctx.resilient_parsing:
            click.echo(text())
            ctx.exit()

    return click.option(
        *names, is_flag=True, is_eager=True, expose_value=False, callback=show,
        help="Show the version and exit.",
    )  # fmt: skip
