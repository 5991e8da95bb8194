"""The table of commands, and how ``nvshim`` ends."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import shell_complete

from api.errors import NvshimError
from integration import exits
from integration.cli.errors import AnswerUnwritten
from integration.cli.lazy import LazyGroup
from integration.cli.options import version_option
from integration.cli.output import Format, tell_error
from integration.compat import NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPLETION_VARIABLE: Final = "_NVSHIM_COMPLETE"
"""Set by the shell's completion, which runs the program to ask what may follow."""

EVERYTHING: Final = "nvshim.everything"
"""In the context's ``meta``: the help lists the hidden group as well."""

GROUPS: Final = {
    "Look": {
        "list": "List GPUs and MIG devices, and what holds them",
        "ps": "List running shims, and which containers hold GPUs",
        "top": "Show live what containers use of the GPUs",
        "info": "Show the driver, where it was found, and what is installed",
        "version": "Show the version",
        "help": "Show the help of a command",
    },
    "Debug": {
        "explain": "Explain what a container got, and error codes",
        "doctor": "Find what is wrong with this node, and say what to do",
        "verify": "Try out whether pods on this node get their GPUs",
        "ledger": "Find GPUs held by mistake, and release dead claims",
        "simulate": "Make a simulated GPU node to try things on",
    },
    "Set up": {
        "install": "Install a version, or switch to another",
        "uninstall": "Remove what is installed",
        "configure": "Configure containerd, Docker or CRI-O for the shim",
        "config": "Show, check and change the configuration",
        "completion": "Print what makes a shell complete nvshim",
    },
    "Node": {
        "node": "Run the node agent",
        "drain": "Take a GPU, or the driver, out of service",
        "undrain": "Return it to service",
        "reset": "Reset a GPU that nobody holds",
        "health": "Put back a device that failed",
        "devices": "Make device nodes and /dev/char links",
        "cdi": "Write, list, check and move CDI specs",
    },
    "Internal": {
        "status": "Show the installed versions; part of info",
        "compat": "Act as nvidia-ctk or nvidia-container-cli",
        "node-installer": "Install on a Kubernetes node, and keep it so",
        "node-exec": "Become the node's own nvshim, in the node's root",
    },
}
"""One line of what each command does, in the order of the help; its module has its name."""

HIDDEN: Final = "Internal"
"""The group that only ``nvshim help --all`` lists."""

COMMANDS: Final = {name: told for group in GROUPS.values() for name, told in group.items()}

_MODULES: Final = {name: f"integration.cli.{name.replace('-', '_')}" for name in COMMANDS}


class _Program(LazyGroup):
    """The program, whose help needs none of its commands."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            if title != HIDDEN or ctx.meta.get(EVERYTHING):
                with formatter.section(title):
                    formatter.write_dl([(f"{name:<{width}}", commands[name]) for name in commands])


def _version() -> str:
    from shim import VERSION  # noqa: PLC0415 - one question in a hundred

    return f"nvshim {VERSION}"


@click.group(
    cls=_Program,
    modules=_MODULES,
    unlisted=tuple(GROUPS[HIDDEN]),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@version_option("--version", tell=_version)
def nvshim() -> None:
    """GPUs for containers, without a hook: look at a node, configure it, find what is wrong."""


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
        with nvshim.make_context("nvshim", _given(arguments)) as context:
            meta = context.meta
            nvshim.invoke(context)
            sys.stdout.flush()
    except NvshimError as error:
        tell_error(error, meta.get("nvshim.format", Format.TABLE))
        return exits.FAILED
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return exits.INTERRUPTED
    except BrokenPipeError:
        _silence()
        return exits.BROKEN_PIPE
    except OSError as error:
        # A file that cannot be written has a name, and is some command's to tell of.
        if error.filename is not None or error.errno not in _UNWRITTEN:
            raise
        _silence()
        tell_error(_unwritten(error), meta.get("nvshim.format", Format.TABLE))
        return exits.FAILED
    return exits.OK


_UNWRITTEN: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


def _prepare_streams() -> None:
    """Whoever closed stdout wants no answer; and no file that is opened may come to be stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - the process's own
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - likewise
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A terminal of another encoding lacks some of our characters, and of those of others.
        sys.stdout.reconfigure(errors="backslashreplace")


def _silence() -> None:
    """Nor may the interpreter complain of stdout when it flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwritten(error: OSError) -> NvshimError:
    return AnswerUnwritten(
        "to write the answer to stdout",
        found=os.strerror(error.errno or 0).lower(),
        do="make room there, and see by another command whether what was asked has been done",
    )


def _given(arguments: Sequence[str] | None) -> list[str]:
    if arguments is not None:
        return list(arguments)
    called, *words = sys.argv
    name = os.path.basename(called)
    # A link of that name acts for the program whose place it takes.
    return ["compat", name, *words] if name in NAMES else words
