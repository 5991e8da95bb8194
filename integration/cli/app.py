"""The table of commands, and how ``nvshim`` ends."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from click.shell_completion import shell_complete

from api.errors import NvshimError
from integration.cli import exits
from integration.cli.output import Format, serialized
from integration.compat import NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["COMMANDS", "COMPLETION_VARIABLE", "main", "nvshim"]

COMPLETION_VARIABLE: Final = "_NVSHIM_COMPLETE"
"""Set by the shell's completion, which runs the program to ask what may follow."""


class Command(NamedTuple):
    """Where a command is.

    Attributes:
        module: that has it, as ``command``.
        help: one line of what it does.
    """

    module: str
    help: str


COMMANDS: Final[Mapping[str, Command]] = {
    "list": Command("integration.cli.list", "List GPUs and MIG devices, and what holds them"),
    "info": Command("integration.cli.info", "Tell of the driver, and where it was looked for"),
    "ps": Command("integration.cli.ps", "List running shims"),
    "top": Command("integration.cli.top", "Show live what containers use of the GPUs"),
    "explain": Command("integration.cli.explain", "Tell why a container has what it has"),
    "config": Command("integration.cli.config", "Show, check and change the configuration"),
    "simulate": Command("integration.cli.simulate", "Make a simulated GPU node to try things on"),
    "cdi": Command("integration.cli.cdi", "Write, list, check and move CDI specs"),
    "configure": Command("integration.cli.configure", "Tell an engine of the shim"),
    "install": Command("integration.cli.install", "Install a version, or switch to another"),
    "uninstall": Command("integration.cli.uninstall", "Remove what is installed"),
    "status": Command("integration.cli.status", "Show which versions are there and in effect"),
    "doctor": Command(
        "integration.cli.doctor", "Find what is wrong with this node, and say what to do"
    ),
    "devices": Command("integration.cli.devices", "Make device nodes and /dev/char links"),
    "node": Command("integration.cli.node", "Keep what is told of this node's GPUs true"),
    "health": Command(
        "integration.cli.health", "List what is thought of devices, and put one back"
    ),
    "ledger": Command(
        "integration.cli.ledger", "List who holds which GPU, and what is wrong with that"
    ),
    "compat": Command("integration.cli.compat", "Act as nvidia-ctk or nvidia-container-cli"),
    "node-installer": Command(
        "integration.cli.node_installer", "Install on a Kubernetes node, and keep it so"
    ),
    "node-exec": Command(
        "integration.cli.node_exec", "Become the node's own nvshim, in the node's root"
    ),
    "completion": Command("integration.cli.completion", "Print what makes a shell complete nvshim"),
}
"""Every command by its name, in the order of the help."""


def _keep_lines(command: click.Command) -> None:
    """Lines after click's mark stay lines: in a raw docstring the mark is two characters."""
    if command.help:
        command.help = command.help.replace("\\b\n", "\b\n")
    if isinstance(command, click.Group):
        for each in command.commands.values():
            _keep_lines(each)


class _Lazy(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx  # the commands are the same in every context
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        known = COMMANDS.get(cmd_name)
        if known is None:
            return None
        command = importlib.import_module(known.module).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{known.module}.command is no command")
        _keep_lines(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Without importing one of them.
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001, FBT001 - click's signature
    if not value or ctx.resilient_parsing:
        return
    from shim import VERSION  # noqa: PLC0415 - one question in a hundred

    click.echo(f"nvshim {VERSION}")
    ctx.exit()


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Say which version this is.",
)  # fmt: skip
def nvshim() -> None:
    """GPUs for containers, without a hook: look at a node, configure it, find what is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: without the program's name; by default those of the process.

    Returns:
        The exit status; see :mod:`integration.cli.exits`.
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
        _tell(error, meta.get("nvshim.format", Format.TABLE))
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
        _tell(_unwritten(error), meta.get("nvshim.format", Format.TABLE))
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
    from integration.cli.errors import AnswerUnwritten  # noqa: PLC0415 - seldom

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


def _tell(error: NvshimError, form: Format) -> None:
    if form is Format.TABLE:
        sys.stderr.write(f"{error}\n")
        return
    document = {
        "error": {
            "code": error.code,
            "name": error.slug(),
            "asked": error.asked,
            "found": error.found,
            "do": error.do,
        }
    }
    sys.stderr.write(serialized(document, form))
