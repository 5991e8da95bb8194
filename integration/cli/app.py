"""The table of commands, and the handling of their errors."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
from click.shell_completion import shell_complete

from api.errors import NvshimError
from integration import exits
from integration.cli.errors import AnswerUnwritten, FileUnusable
from integration.cli.lazy import LazyGroup
from integration.cli.options import version_option
from integration.cli.output import Format, best_effort, print_error, silence
from integration.compat import NAMES

COMPLETION_VARIABLE: Final = "_NVSHIM_COMPLETE"
"""Set by the shell's completion script, which runs the program to get completions."""

EVERYTHING: Final = "nvshim.everything"
"""Key in the context's ``meta``: the help lists the hidden group as well."""

GROUPS: Final = {
    "Look": {
        "list": "List GPUs and MIG devices, and the containers that hold them",
        "ps": "List running shims, or the containers that hold GPUs",
        "top": "Show the GPU usage of containers, live",
        "info": "Show the driver, the devices and what is installed",
        "version": "Show the version",
        "help": "Show the help of a command",
    },
    "Debug": {
        "explain": "Explain a container's GPUs, or an error code",
        "doctor": "Diagnose this node: find problems and their remedies",
        "verify": "Run test pods and check that they get their GPUs",
        "ledger": "Find GPUs held by mistake, and release dead claims",
        "simulate": "Create simulated GPU nodes for tests",
    },
    "Set up": {
        "install": "Install a version, or switch to another",
        "uninstall": "Remove the installation",
        "configure": "Configure containerd, Docker or CRI-O for the shim",
        "config": "Show, check and change the configuration",
        "completion": "Print a shell's completion script",
    },
    "Node": {
        "node": "Run the node agent",
        "drain": "Take a GPU, or the driver, out of service",
        "undrain": "Return a device to service",
        "reset": "Reset a GPU that no process holds",
        "mig": "Apply layouts of MIG devices",
        "health": "Clear a failed device's health state",
        "devices": "Create device nodes and /dev/char links",
        "cdi": "Write, list, check and transform CDI specs",
    },
    "Internal": {
        "status": "Show the installed versions; part of info",
        "compat": "Act as nvidia-ctk or nvidia-container-cli",
        "node-installer": "Install on a Kubernetes node and keep it installed",
        "node-exec": "Run the node's own nvshim in the node's root",
    },
}
"""A line for each command, in the order of the help; the command's module has its name."""

HIDDEN: Final = "Internal"
"""The group that only ``nvshim help --all`` lists."""

COMMANDS: Final = {name: line for group in GROUPS.values() for name, line in group.items()}

_MODULES: Final = {name: f"integration.cli.{name.replace('-', '_')}" for name in COMMANDS}


class _Program(LazyGroup):
    """The program; its help imports no command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            if title != HIDDEN or ctx.meta.get(EVERYTHING):
                with formatter.section(title):
                    formatter.write_dl([(f"{name:<{width}}", commands[name]) for name in commands])


def _version() -> str:
    from shim import VERSION  # noqa: PLC0415 - rarely needed

    return f"nvshim {VERSION}"


@click.group(
    cls=_Program,
    modules=_MODULES,
    unlisted=tuple(GROUPS[HIDDEN]),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@version_option("--version", text=_version)
def nvshim() -> None:
    """Inspect, configure and debug a node that gives GPUs to containers without a hook."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: without the program's name; by default those of the process.

    Returns:
        The exit status; see :mod:`integration.exits`.
    """
    _prepare_streams()
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        return shell_complete(nvshim, {}, "nvshim", COMPLETION_VARIABLE, instruction)
    meta: dict[str, Any] = {}
    try:
        with nvshim.make_context("nvshim", _command_line(arguments)) as context:
            meta = context.meta
            nvshim.invoke(context)
            sys.stdout.flush()
    except NvshimError as error:
        with best_effort():
            print_error(error, meta.get("nvshim.format", Format.TABLE))
        return exits.FAILED
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        with best_effort():
            error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return exits.INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)
        return exits.BROKEN_PIPE
    except OSError as error:
        # Without a file name it is an error of stdout.
        if error.filename is None:
            if error.errno not in _UNWRITTEN:
                raise
            silence(sys.stdout)
        with best_effort():
            print_error(_described(error), meta.get("nvshim.format", Format.TABLE))
        return exits.FAILED
    return exits.OK


_UNWRITTEN: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


def _prepare_streams() -> None:
    """Open closed standard streams on /dev/null, so that no other file becomes stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - the process's own
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as above
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A terminal's encoding may lack some characters; escape them.
        sys.stdout.reconfigure(errors="backslashreplace")


def _described(error: OSError) -> NvshimError:
    found = os.strerror(error.errno or 0).lower()
    if error.filename is not None:
        return FileUnusable(f"to use {os.fsdecode(error.filename)}", found=found)
    return AnswerUnwritten(
        "to write the output to stdout",
        found=found,
        do="free disk space there, and check whether the command took effect",
    )


def _command_line(arguments: Sequence[str] | None) -> list[str]:
    if arguments is not None:
        return list(arguments)
    called, *words = sys.argv
    name = os.path.basename(called)
    # A link with this name acts as NVIDIA's program.
    return ["compat", name, *words] if name in NAMES else words
