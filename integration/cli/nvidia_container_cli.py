"""``nvshim compat nvidia-container-cli``: info and list, in the original's format."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import replace
from typing import Any, Final, NamedTuple

import click

from api.errors import NvshimError, one_line
from hooks.config import load_config
from hooks.node.inventory import Inventory
from integration.cli.options import version_option
from integration.compat import COMPATIBLE_WITH
from integration.compat.container_cli import ListSelection, info_text, list_paths, log_lines
from integration.compat.errors import DebugLogUnwritable, NoCounterpart
from integration.compat.gocli import flatten
from integration.devices.creating import CreateOptions, create
from integration.nvml.inventory import inventory_of
from shim import VERSION

_SETTINGS: Final = {"help_option_names": ["-?", "--help", "--usage"]}


class _GlobalFlags(NamedTuple):
    """The flags before the command."""

    debug: str | None
    load_kmods: bool
    root: str | None


def _note(flag: str, why: str) -> None:
    sys.stderr.write(f"nvidia-container-cli: {flag} changes nothing here: {why}\n")


def _version() -> str:
    facts = {
        "cli-version": COMPATIBLE_WITH,
        "lib-version": COMPATIBLE_WITH,
        "build date": "",
        "build revision": f"nvshim {VERSION}",
        "build compiler": f"{platform.python_implementation()} {platform.python_version()}",
        "build platform": platform.machine(),
        "build flags": "",
    }
    return "\n".join(f"{title}: {fact}".rstrip() for title, fact in facts.items())


@click.group("nvidia-container-cli", context_settings=_SETTINGS)
@click.option("-d", "--debug", metavar="FILE", help="Log to this file where everything was found.")
@click.option("-k", "--load-kmods", is_flag=True,
              help="Load kernel modules and create device nodes first.")  # fmt: skip
@click.option("-r", "--root", metavar="PATH", help="The driver root.")
@click.option("-u", "--user", is_flag=True, help="Has no effect.")
@click.option("-l", "--ldcache", metavar="FILE", help="Has no effect.")
@version_option("-V", "--version", text=_version)
@click.pass_context
def command(
    ctx: click.Context, /, *, debug: str | None, load_kmods: bool, root: str | None, **idle: Any
) -> None:
    """Report on the driver and the GPUs as nvidia-container-cli does."""
    ctx.obj = _GlobalFlags(debug, load_kmods, root)
    if idle["user"]:
        _note("--user", "privileges are never dropped")
    if idle["ldcache"]:
        _note("--ldcache", "libraries are searched in the driver's directories")


def _read_node(flags: _GlobalFlags) -> Inventory:
    """Read the inventory; with --load-kmods load modules first."""
    config = load_config()
    if flags.root is not None:
        config = replace(config, driver_root=os.path.abspath(flags.root))
    if flags.load_kmods:
        try:
            create(config, CreateOptions(modules=True, links=False))
        except NvshimError as error:
            # The original continues too.
            sys.stderr.write(f"{error}\n")
    inventory = inventory_of(config)
    if flags.debug is not None:
        _write_log(flags.debug, [*log_lines(inventory)])
    return inventory


def _write_log(path: str, lines: list[str]) -> None:
    head = "\n-- WARNING, the following logs are for debugging purposes only --\n\n"
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(head + "".join(f"{one_line(line)}\n" for line in lines))
    except OSError as error:
        raise DebugLogUnwritable(
            f"to write the log of --debug={path}",
            found=error.strerror or str(error),
            do="name another file",
        ) from error


@command.command("info")
@click.option("--csv", is_flag=True, help="Print comma-separated values.")
@click.pass_obj
def info(flags: _GlobalFlags, *, csv: bool) -> None:
    """Report information about the driver and devices."""
    sys.stdout.write(info_text(_read_node(flags), csv=csv))


@command.command("list")
@click.option("-d", "--device", "devices", multiple=True, metavar="ID", callback=flatten,
              help="List the device nodes of these devices.")  # fmt: skip
@click.option("-l", "--libraries", is_flag=True, help="Driver libraries.")
@click.option("-b", "--binaries", is_flag=True, help="Driver programs.")
@click.option("-i", "--ipcs", is_flag=True, help="Sockets of the driver's services.")
@click.option("-f", "--firmwares", is_flag=True, help="Driver firmware.")
@click.option("--compat32", is_flag=True, help="32-bit libraries as well.")
@click.pass_obj
def list_(flags: _GlobalFlags, /, **listed: Any) -> None:
    """List driver components; all of them without options."""
    listed["devices"] = listed["devices"] or None
    selection = ListSelection(**listed) if any(listed.values()) else ListSelection.everything()
    paths = list_paths(_read_node(flags), selection)
    sys.stdout.write("".join(f"{path}\n" for path in paths))


@command.command("configure", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def configure(words: tuple[str, ...]) -> None:
    """Not supported: the shim adds GPUs before a container starts."""
    raise NoCounterpart(
        f"nvidia-container-cli configure {' '.join(words)}".rstrip(),
        found="the shim adds GPUs before a container starts, so a running one is never changed",
        do="run the container with the shim (nvshim configure), or with a CDI spec "
        "(nvshim cdi generate)",
    )
