"""``nvshim configure containerd|docker|crio``: add the shim to an engine, or remove it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeAlias

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

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

# Options with paths. They are made absolute, because other processes read them from the records.
_PATHS: Final = {"config", "drop_in", "handler_options", "hook_directory", "records", "shim"}


@click.group("configure")
def command() -> None:
    """Add the shim to an engine's configuration, or remove it (--remove).

    Only the shim's own part is changed. The engine itself checks the result before it is written.
    Nothing is restarted without --restart.
    """


def _path(names: str, text: str, default: str | None = None, metavar: str = "PATH") -> Decorator:
    """Return an option for a file or directory; ``names`` is its flag, and its parameter if any."""
    return click.option(
        *names.split(), metavar=metavar, default=default, show_default=default is not None,
        type=click.Path(), help=text,
    )  # fmt: skip


def _switch(names: str, text: str) -> Decorator:
    """Return an on/off option that keeps the current setting if it is not given."""
    return click.option(names, default=None, help=f"{text}; by default the current setting stays.")


def _patterns(flag: str, name: str, text: str) -> Decorator:
    return click.option(flag, name, multiple=True, metavar="PATTERN", help=text)


_common = stacked(
    click.option("--runtime-name", default="nvidia", show_default=True, metavar="NAME",
                 help="The runtime's name in a RuntimeClass or for --runtime."),
    _switch("--set-default/--no-set-default", "Make it the default runtime"),
    _path("--shim", "The shim's path; by default the one in the engine's PATH."),
    click.option("--dry-run", is_flag=True,
                 help=f"Show the change and do nothing; exit with {exits.FOUND} if there is one."),
    click.option("--remove", is_flag=True, help="Remove the shim from the configuration."),
    click.option("--replace", is_flag=True, default=None,
                 help="Replace an existing runtime of this name, such as that of NVIDIA's "
                 "toolkit; --remove restores it."),
    click.option("--force", is_flag=True, help="Overwrite manual changes."),
    _path("--records", "Record the previous settings in this directory.", RECORDS, "DIRECTORY"),
    click.option("--restart", "mode", default=Mode.NONE.value, show_default=True,
                 type=click.Choice([mode.value for mode in Mode]),
                 help="How to restart or reload the engine if the change needs it."),
    _path("--socket", "The engine's socket: for --restart, and to find the running engine."),
    click.option("--unit", metavar="NAME", help="The engine's systemd unit, for --restart."),
)  # fmt: skip
"""The options that every engine has."""


@command.command("containerd")
@_common
@_path("--config", "containerd's configuration file.", DEFAULT_CONFIG)
@_path("--drop-in", "Write this drop-in; by default one that the root file imports.")
@click.option(
    "--systemd-cgroup", type=click.Choice(["auto", "yes", "no"]), default="auto",
    show_default=True,
    help="Use the systemd cgroup driver; auto: as in runc's handler, or else by the name that the "
    "kubelet gives a pod's cgroup.",
)  # fmt: skip
@click.option(
    "--runtime-type", type=click.Choice([RUNTIME_TYPE, RUNC_TYPE]),
    help="The handler's type. Use runc's type, with the shim's path, for a containerd that queries "
    "the features of no other type (2.0 to 2.2.6, 2.3.0 to 2.3.3); pods with hostUsers: false need "
    "it there. By default the current setting stays, at first the shim's type.",
)  # fmt: skip
@_switch("--enable-cdi/--no-enable-cdi", "Enable CDI in containerd (1.7)")
@_patterns(
    "--container-annotation", "container_annotations",
    "Pass these container annotations to the shim; by default those that name devices.",
)  # fmt: skip
@_patterns(
    "--pod-annotation", "pod_annotations",
    "Pass these pod annotations to the shim; by default the current setting stays, at first none. "
    "A * matches no slash: */* is for names with a prefix.",
)  # fmt: skip
@_path(
    "--containerd program",
    "Check the result with this containerd; by default the running or installed one.",
)
@_path(
    "--handler-options", "Where containerd 1.6 reads the handler's options.",
    "/etc/containerd-shim-nvidia/handlers", "DIRECTORY",
)  # fmt: skip
@with_output
def containerd(output: Output, systemd_cgroup: str, **options: Any) -> None:
    """Add a runtime handler to containerd's CRI plugin.

    With containerd 2 the handler goes into a drop-in of the root file's version; an import is added
    to the root file if none covers the drop-in. With containerd 1 a drop-in would replace the root
    file's CRI section, so the handler goes into a block at the end of the root file.
    """
    # A removal does not depend on the node's configuration, which may be invalid.
    if not options["container_annotations"] and not options["remove"]:
        prefixes = load_config(None).annotation_prefixes
        options["container_annotations"] = tuple(f"{prefix}*" for prefix in prefixes)
    options["pod_annotations"] = options["pod_annotations"] or None
    options["systemd_cgroup"] = {"auto": None, "yes": True, "no": False}[systemd_cgroup]
    _configure(output, ContainerdOptions, options)


@command.command("docker")
@_common
@_path("--config", "Docker's configuration file.", docker_.DEFAULT_CONFIG)
@_switch("--enable-cdi/--no-enable-cdi", "Enable CDI in Docker (before 28.2)")
@_path(
    "--hook-directory", "Install the program that --gpus needs here, if it is missing.",
    "/usr/local/bin", "DIRECTORY",
)  # fmt: skip
@_path("--dockerd program", "Check the result with this dockerd; by default the installed one.")
@with_output
def docker(output: Output, **options: Any) -> None:
    """Add a runtime to Docker, and make docker run --gpus work."""
    _configure(output, docker_.Options, options)


@command.command("crio")
@_common
@_path("--config", "CRI-O's configuration file.", crio_.DEFAULT_CONFIG)
@_path("--drop-in", "Write the handler to this drop-in.", crio_.DEFAULT_DROP_IN)
@_path("--crio program", "Check the result with this program, if it is installed.")
@with_output
def crio(output: Output, **options: Any) -> None:
    """Add a runtime handler of the type vm to CRI-O (not yet tested with CRI-O)."""
    _configure(output, crio_.Options, options)


def _configure(output: Output, kind: Callable[..., Options], options: dict[str, Any]) -> None:
    dry_run, remove = options.pop("dry_run"), options.pop("remove")
    mode, address, unit = Mode(options.pop("mode")), options.pop("socket"), options.pop("unit")
    for key, value in options.items():
        if fault := _fault_of(key, value):
            raise click.BadParameter(fault, param_hint=f"--{key.replace('_', '-')}")
    for key in _PATHS & options.keys():
        if options[key] is not None:
            options[key] = os.path.abspath(options[key])
    if kind is ContainerdOptions and (address or options["config"] == DEFAULT_CONFIG):
        # The socket of a containerd with another configuration is unknown.
        options["socket"] = address or SOCKETS["containerd"]
    options["replace"] = options["replace"] or None
    wanted = kind(**options)
    change = plan_removal(wanted) if remove else plan(wanted)
    if wanted.shim and not remove and (note := _missing(wanted.shim)):
        change = replace(change, notes=(*change.notes, note))
    done = Mode.NONE
    if not dry_run:
        apply(change)
    try:
        if not dry_run:
            address, unit = address or SOCKETS[change.engine], unit or UNITS[change.engine]
            done = restart(change, mode, address=address, unit=unit)
    finally:
        # The files are written even if the restart failed.
        _show(output, change, done, dry_run=dry_run)
    found_if(dry_run and change.files)


def _fault_of(key: str, value: Any) -> str:
    """Return why an option's value cannot be used; "" if nothing prevents it."""
    # From an unset shell variable: "" would mean the working directory.
    if value == "" and key in _PATHS:
        return "It is empty."
    try:
        ("".join(value) if isinstance(value, tuple) else str(value)).encode()
    except UnicodeEncodeError:
        return "It is not UTF-8, as an engine's configuration has to be."
    return ""


def _missing(shim: str) -> str:
    """Return a note if the program that a handler names is missing; "" if it is there.

    This is not an error: a node's image may be configured before the shim is installed in it.
    """
    if os.path.isfile(shim) and os.access(shim, os.X_OK):
        return ""
    why = "is not a program" if os.path.exists(shim) else "does not exist"
    return f"{shim} {why}: no container with the handler starts before it is installed"


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
    how = {"signal": "notified by a signal", "systemd": "restarted by systemd"}.get(str(done))
    lines.append(f"{change.engine} was {how}" if how else change.why)
    output.text("".join(lines), document)
