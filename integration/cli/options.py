"""The options that many commands have, so that they mean the same everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import click

from integration import exits
from integration.cli.kinds import KINDS
from integration.cli.output import Format, Output

R = TypeVar("R")

_OF_ONE: Final = (Format.TABLE, Format.JSON, Format.YAML)


def stacked(*options: Callable[[Any], Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Several options as one decorator; the help has them in this order."""

    def give(command: Callable[..., R]) -> Callable[..., R]:
        for option in reversed(options):
            command = option(command)
        return command

    return give


def completing(
    words: Callable[[Mapping[str, Any]], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What an option or argument can be completed to.

    Args:
        words: all that it could be, by the values that are given already; case does not matter.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        del param
        begun = incomplete.lower()
        return [word for word in words(ctx.params) if word.lower().startswith(begun)]

    return complete


def found_if(found: object) -> None:
    """End with the status of what was looked for and found, if it was."""
    if found:
        click.get_current_context().exit(exits.FOUND)


def with_output(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command ``-o/--output table|json|yaml``; it gets an :class:`Output` first."""
    return _answering(command, _OF_ONE)


def with_listing(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command that lists things ``-o table|wide|json|yaml|name``, ``-q``, ``--no-headers``.

    Args:
        command: the function that answers; it gets an :class:`Output` first.
    """
    quiet = click.option("-q", "--quiet", is_flag=True, help="Only the names, as with -o name.")
    bare = click.option("--no-headers", "bare", is_flag=True, help="No line of titles.")
    return quiet(bare(_answering(command, tuple(Format))))


def _answering(command: Callable[..., R], forms: tuple[Format, ...]) -> Callable[..., R]:
    @click.option(
        "-o", "--output", "form", type=click.Choice([form.value for form in forms]),
        default=Format.TABLE.value, show_default=True, help="How to write the answer.",
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
    """Give a command ``--config FILE``; it gets the node's :class:`~hooks.config.Config` first.

    Below :func:`with_output` it gets it second, after the :class:`Output`.
    """

    @click.option(
        "--config", "config_path", metavar="FILE", type=click.Path(dir_okay=False),
        help="The configuration; by default that of this node.",
    )  # fmt: skip
    @functools.wraps(command)
    def answer(*args: Any, config_path: str | None, **kwargs: Any) -> R:
        from hooks.config import load_config  # noqa: PLC0415 - nvshim --help does without

        return command(*args, load_config(config_path), **kwargs)

    return answer


located = stacked(
    click.option(
        "--containerd-state", "states", metavar="DIR", multiple=True,
        envvar="NVSHIM_CONTAINERD_STATE", type=click.Path(file_okay=False),
        help="Where containerd keeps its state; may be given several times. By default where"
        " packages, Docker, k3s, k0s and MicroK8s have it, and where shims run.",
    ),
    click.option(
        "--procfs", "proc", metavar="DIR", default="/proc", show_default=True,
        type=click.Path(file_okay=False, exists=True), help="Where the node's processes are shown.",
    ),
)  # fmt: skip
"""Gives a command ``states``, which may be empty, and ``proc``."""


_POD_RESOURCES: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"

pod_resources_option = click.option(
    "--pod-resources", metavar="SOCKET", default=_POD_RESOURCES, show_default=True,
    type=click.Path(dir_okay=False),
    help="Where the kubelet says what it has given to whom; if it is not there, it is not asked.",
)  # fmt: skip


holding = stacked(
    click.option("--stale", is_flag=True, help="Only those whose driver is gone: drain them."),
    click.option(
        "--orphans", is_flag=True, help="Only those that hold a GPU and nobody seems to know of."
    ),
    pod_resources_option,
)
"""What a command has that lists who holds a device."""


def version_option(
    *names: str, tell: Callable[[], str]
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command a flag that says the version, and ends."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's signature
        del param
        if value and not ctx.resilient_parsing:
            click.echo(tell())
            ctx.exit()

    return click.option(
        *names, is_flag=True, is_eager=True, expose_value=False, callback=show,
        help="Say which version this is.",
    )  # fmt: skip
