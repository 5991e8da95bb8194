"""``nvshim configure containerd|docker|crio``: tell an engine of the shim, or take that back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from integration.cli import exits
from integration.cli.options import with_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.cli.output import Output
    from integration.engines import Change, Options

R = TypeVar("R")

# Options that name files, which are written down and read by others from elsewhere.
_PATHS: Final = {"config", "drop_in", "handler_options", "hook_directory", "records", "shim"}

_AS_BEFORE: Final = "not said, it stays as it was configured."
_DROP_IN_HELP = "Where to write the drop-in; by default where the root file imports one from."


@click.group("configure")
def command() -> None:
    """Tell an engine of the shim, or take that back (--remove).

    Only our own part is added, what others wrote stays as it is, and the engine itself checks the
    result before it is put in place. Nothing is restarted unless --restart asks for it.
    """


def _common(function: Callable[..., R]) -> Callable[..., R]:
    """The options that every engine has."""
    options = [
        click.option("--runtime-name", default="nvidia", show_default=True, metavar="NAME",
                     help="The runtime's name, as a RuntimeClass or --runtime says it."),
        click.option("--set-default/--no-set-default", default=None,
                     help=f"Give it to who names no runtime; {_AS_BEFORE}"),
        click.option("--shim", metavar="PATH", type=click.Path(),
                     help="The shim; by default the one on the engine's PATH."),
        click.option("--dry-run", is_flag=True,
                     help=f"Show the change and do nothing; status {exits.FOUND} if there is one."),
        click.option("--remove", is_flag=True, help="Take out what was configured."),
        click.option("--force", is_flag=True, help="Overwrite what was changed by hand."),
        click.option("--restart", "mode", default="none", show_default=True,
                     type=click.Choice(["none", "signal", "systemd"]),
                     help="How to tell the engine, if it needs to be told."),
        click.option("--socket", metavar="PATH", type=click.Path(),
                     help="Where the engine listens: for --restart, and to ask which one runs."),
        click.option("--unit", metavar="NAME", help="Its name in systemd, for --restart."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@command.command("containerd")
@_common
@click.option(
    "--config",
    metavar="PATH",
    default="/etc/containerd/config.toml",
    show_default=True,
    type=click.Path(),
    help="containerd's configuration.",
)
@click.option("--drop-in", metavar="PATH", type=click.Path(), help=_DROP_IN_HELP)
@click.option(
    "--systemd-cgroup",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    help="Whether systemd makes the cgroups; auto: as for runc.",
)
@click.option(
    "--enable-cdi/--no-enable-cdi",
    default=None,
    help=f"Let containerd apply CDI specs too (1.7); {_AS_BEFORE}",
)
@click.option(
    "--container-annotation",
    "container_annotations",
    multiple=True,
    metavar="PATTERN",
    help="Annotations that containerd hands on; by default those that name devices.",
)
@click.option(
    "--pod-annotation",
    "pod_annotations",
    multiple=True,
    metavar="PATTERN",
    help="Likewise of the pod; not said, it stays as it was configured: at first, none.",
)
@click.option(
    "--containerd",
    "program",
    metavar="PATH",
    type=click.Path(),
    help="The program that checks the result; by default the one that runs, or is installed.",
)
@click.option(
    "--handler-options",
    metavar="DIRECTORY",
    type=click.Path(),
    default="/etc/containerd-shim-nvidia/handlers",
    show_default=True,
    help="Where containerd 1.6 finds the handler's options.",
)
@with_output
def containerd(output: Output, systemd_cgroup: str, **given: Any) -> None:
    """Give containerd's CRI plugin a runtime handler.

    With containerd 2 it is a drop-in, in the version of the root file, and the root file gets an
    import if none covers it. With containerd 1, where a drop-in would replace what the root file
    says of the CRI plugin, it is a marked block at the end of the file itself.
    """
    from hooks.config import load_config  # noqa: PLC0415 - after the options have been read
    from integration.engines import ContainerdOptions  # noqa: PLC0415 - see above

    if not given["container_annotations"]:
        prefixes = load_config(None).annotation_prefixes
        given["container_annotations"] = tuple(f"{prefix}*" for prefix in prefixes)
    given["pod_annotations"] = given["pod_annotations"] or None
    given["systemd_cgroup"] = {"auto": None, "yes": True, "no": False}[systemd_cgroup]
    _configure(output, ContainerdOptions, given)


@command.command("docker")
@_common
@click.option(
    "--config",
    metavar="PATH",
    default="/etc/docker/daemon.json",
    show_default=True,
    type=click.Path(),
    help="Docker's configuration.",
)
@click.option(
    "--enable-cdi/--no-enable-cdi",
    default=None,
    help=f"Let Docker apply CDI specs too (before 28.2); {_AS_BEFORE}",
)
@click.option(
    "--hook-directory",
    metavar="DIRECTORY",
    default="/usr/local/bin",
    show_default=True,
    type=click.Path(),
    help="Where to leave what --gpus looks for, if there is none.",
)
@click.option(
    "--records",
    metavar="DIRECTORY",
    type=click.Path(),
    default="/etc/containerd-shim-nvidia/configured",
    show_default=True,
    help="Where to note what was there before.",
)
@click.option(
    "--dockerd",
    "program",
    metavar="PATH",
    type=click.Path(),
    help="The program that checks the result; by default the installed one.",
)
@with_output
def docker(output: Output, **given: Any) -> None:
    """Give Docker a runtime, and make --gpus known to it."""
    from integration.engines.docker import Options  # noqa: PLC0415 - after the options were read

    _configure(output, Options, given)


@command.command("crio")
@_common
@click.option(
    "--config",
    metavar="PATH",
    default="/etc/crio/crio.conf",
    show_default=True,
    type=click.Path(),
    help="CRI-O's configuration, which is only read.",
)
@click.option(
    "--drop-in",
    metavar="PATH",
    default="/etc/crio/crio.conf.d/99-nvshim.conf",
    show_default=True,
    type=click.Path(),
    help="Where to write the handler.",
)
@click.option(
    "--crio",
    "program",
    metavar="PATH",
    type=click.Path(),
    help="The program that checks the result, if it is installed.",
)
@with_output
def crio(output: Output, **given: Any) -> None:
    """Give CRI-O a runtime handler of the type vm (not tried with a CRI-O yet)."""
    from integration.engines.crio import Options  # noqa: PLC0415 - after the options were read

    _configure(output, Options, given)


def _configure(output: Output, kind: Callable[..., Options], given: dict[str, Any]) -> None:
    from integration.engines import ContainerdOptions, apply, plan, plan_removal  # noqa: PLC0415
    from integration.engines.errors import EnginesError  # noqa: PLC0415 - see above
    from integration.engines.options import DEFAULT_CONFIG  # noqa: PLC0415
    from integration.engines.restart import SOCKETS, UNITS, Mode, restart  # noqa: PLC0415

    dry_run, remove = given.pop("dry_run"), given.pop("remove")
    mode, address, unit = Mode(given.pop("mode")), given.pop("socket"), given.pop("unit")
    for key in _PATHS & given.keys():
        if given[key] is not None:
            given[key] = os.path.abspath(given[key])
    if kind is ContainerdOptions and (address or given["config"] == DEFAULT_CONFIG):
        # Of the containerd that has another configuration it is not known where it listens.
        given["socket"] = address or SOCKETS["containerd"]
    options = kind(**given)
    change = plan_removal(options) if remove else plan(options)
    done = Mode.NONE
    if not dry_run:
        apply(change)
        try:
            done = restart(
                change, mode, address=address or SOCKETS[change.engine],
                unit=unit or UNITS[change.engine],
            )  # fmt: skip
        except EnginesError:
            # The files are in place, whatever became of the engine.
            _show(output, change, done, dry_run=dry_run)
            raise
    _show(output, change, done, dry_run=dry_run)
    if dry_run and change.files:
        click.get_current_context().exit(exits.FOUND)


def _show(output: Output, change: Change, done: str, *, dry_run: bool) -> None:
    document = {
        "engine": change.engine,
        "changed": bool(change.files),
        "dry_run": dry_run,
        "files": [
            {"path": file.path, "action": file.action, "diff": file.diff()} for file in change.files
        ],
        "restart": {"needed": change.need.value, "why": change.why, "done": str(done)},
        "notes": list(change.notes),
        "in_force": dict(change.in_force),
    }
    if dry_run:
        lines = [change.diff()] if change.files else []
    else:
        lines = [f"{file.action} {file.path}\n" for file in change.files]
    lines += [f"{note}\n" for note in change.notes]
    told = {"signal": "told by a signal", "systemd": "restarted by systemd"}.get(str(done))
    lines.append(f"{change.engine} was {told}" if told else change.why)
    output.text("".join(lines), document)
