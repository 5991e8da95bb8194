"""``nvshim configure containerd|docker|crio``: tell an engine of the shim, or take that back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click

from hooks.config import load_config
from integration import exits
from integration.cli.options import found_if, stacked, with_output
from integration.cli.output import Output
from integration.engines import Change, ContainerdOptions, Options, apply, plan, plan_removal
from integration.engines import crio as crio_
from integration.engines import docker as docker_
from integration.engines.options import DEFAULT_CONFIG
from integration.engines.restart import SOCKETS, UNITS, Mode, restart
from integration.engines.runtime_options import RECORDS
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE

if TYPE_CHECKING:
    Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

# Options that name files, which are written down and read by others from elsewhere.
_PATHS: Final = {"config", "drop_in", "handler_options", "hook_directory", "records", "shim"}


@click.group("configure")
def command() -> None:
    """Tell an engine of the shim, or take that back (--remove).

    Only our own part is added, what others wrote stays as it is, and the engine itself checks the
    result before it is put in place. Nothing is restarted unless --restart asks for it.
    """


def _path(names: str, told: str, default: str | None = None, metavar: str = "PATH") -> Decorator:
    """An option that names a file or a directory, by its flag and perhaps another name."""
    return click.option(
        *names.split(), metavar=metavar, default=default, show_default=default is not None,
        type=click.Path(), help=told,
    )  # fmt: skip


def _switch(names: str, told: str) -> Decorator:
    """An option that is given, denied, or neither: then all stays as it is."""
    told = f"{told}; not said, it stays as it was configured."
    return click.option(names, default=None, help=told)


def _patterns(flag: str, name: str, told: str) -> Decorator:
    return click.option(flag, name, multiple=True, metavar="PATTERN", help=told)


_common = stacked(
    click.option("--runtime-name", default="nvidia", show_default=True, metavar="NAME",
                 help="The runtime's name, as a RuntimeClass or --runtime says it."),
    _switch("--set-default/--no-set-default", "Give it to who names no runtime"),
    _path("--shim", "The shim; by default the one on the engine's PATH."),
    click.option("--dry-run", is_flag=True,
                 help=f"Show the change and do nothing; status {exits.FOUND} if there is one."),
    click.option("--remove", is_flag=True, help="Take out what was configured."),
    click.option("--replace", is_flag=True, default=None,
                 help="Take the place of a runtime of that name, such as that of NVIDIA's "
                 "toolkit; --remove puts it back."),
    click.option("--force", is_flag=True, help="Overwrite what was changed by hand."),
    _path("--records", "Where to note what was there before.", RECORDS, "DIRECTORY"),
    click.option("--restart", "mode", default=Mode.NONE.value, show_default=True,
                 type=click.Choice([mode.value for mode in Mode]),
                 help="How to tell the engine, if it needs to be told."),
    _path("--socket", "Where the engine listens: for --restart, and to ask which one runs."),
    click.option("--unit", metavar="NAME", help="Its name in systemd, for --restart."),
)  # fmt: skip
"""The options that every engine has."""


@command.command("containerd")
@_common
@_path("--config", "containerd's configuration.", DEFAULT_CONFIG)
@_path("--drop-in", "Where to write the drop-in; by default where the root file imports one from.")
@click.option(
    "--systemd-cgroup", type=click.Choice(["auto", "yes", "no"]), default="auto",
    show_default=True,
    help="Whether systemd makes the cgroups; auto: as for runc, or by their names alone.",
)  # fmt: skip
@click.option(
    "--runtime-type", type=click.Choice([RUNTIME_TYPE, RUNC_TYPE]),
    help="The handler's type. runc's, with the path of the shim, is for a containerd that asks no "
    "other what it can do (2.0 to 2.2.6, 2.3.0 to 2.3.3): there, pods with hostUsers: false need "
    "it. Not said, it stays as it was configured: at first, ours.",
)  # fmt: skip
@_switch("--enable-cdi/--no-enable-cdi", "Let containerd apply CDI specs too (1.7)")
@_patterns(
    "--container-annotation", "container_annotations",
    "Annotations that containerd hands on; by default those that name devices.",
)  # fmt: skip
@_patterns(
    "--pod-annotation", "pod_annotations",
    "Likewise of the pod; not said, it stays as it was configured: at first, none.",
)  # fmt: skip
@_path(
    "--containerd program",
    "The program that checks the result; by default the one that runs, or is installed.",
)
@_path(
    "--handler-options", "Where containerd 1.6 finds the handler's options.",
    "/etc/containerd-shim-nvidia/handlers", "DIRECTORY",
)  # fmt: skip
@with_output
def containerd(output: Output, systemd_cgroup: str, **given: Any) -> None:
    """Give containerd's CRI plugin a runtime handler.

    With containerd 2 it is a drop-in, in the version of the root file, and the root file gets an
    import if none covers it. With containerd 1, where a drop-in would replace what the root file
    says of the CRI plugin, it is a block at the end of the file itself.
    """
    if not given["container_annotations"]:
        prefixes = load_config(None).annotation_prefixes
        given["container_annotations"] = tuple(f"{prefix}*" for prefix in prefixes)
    given["pod_annotations"] = given["pod_annotations"] or None
    given["systemd_cgroup"] = {"auto": None, "yes": True, "no": False}[systemd_cgroup]
    _configure(output, ContainerdOptions, given)


@command.command("docker")
@_common
@_path("--config", "Docker's configuration.", docker_.DEFAULT_CONFIG)
@_switch("--enable-cdi/--no-enable-cdi", "Let Docker apply CDI specs too (before 28.2)")
@_path(
    "--hook-directory", "Where to leave what --gpus looks for, if there is none.",
    "/usr/local/bin", "DIRECTORY",
)  # fmt: skip
@_path("--dockerd program", "The program that checks the result; by default the installed one.")
@with_output
def docker(output: Output, **given: Any) -> None:
    """Give Docker a runtime, and make --gpus known to it."""
    _configure(output, docker_.Options, given)


@command.command("crio")
@_common
@_path("--config", "CRI-O's own configuration.", crio_.DEFAULT_CONFIG)
@_path("--drop-in", "Where to write the handler.", crio_.DEFAULT_DROP_IN)
@_path("--crio program", "The program that checks the result, if it is installed.")
@with_output
def crio(output: Output, **given: Any) -> None:
    """Give CRI-O a runtime handler of the type vm (not tried with a CRI-O yet)."""
    _configure(output, crio_.Options, given)


def _configure(output: Output, kind: Callable[..., Options], given: dict[str, Any]) -> None:
    dry_run, remove = given.pop("dry_run"), given.pop("remove")
    mode, address, unit = Mode(given.pop("mode")), given.pop("socket"), given.pop("unit")
    for key in _PATHS & given.keys():
        if given[key] is not None:
            given[key] = os.path.abspath(given[key])
    if kind is ContainerdOptions and (address or given["config"] == DEFAULT_CONFIG):
        # Of the containerd that has another configuration it is not known where it listens.
        given["socket"] = address or SOCKETS["containerd"]
    given["replace"] = given["replace"] or None
    options = kind(**given)
    change = plan_removal(options) if remove else plan(options)
    done = Mode.NONE
    if not dry_run:
        apply(change)
    try:
        if not dry_run:
            address, unit = address or SOCKETS[change.engine], unit or UNITS[change.engine]
            done = restart(change, mode, address=address, unit=unit)
    finally:
        # The files are in place, whatever became of the engine.
        _show(output, change, done, dry_run=dry_run)
    found_if(dry_run and change.files)


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
