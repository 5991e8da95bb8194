"""``nvshim compat nvidia-container-cli``: info and list, as scripts read them."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from integration.compat.gocli import flatten

if TYPE_CHECKING:
    from hooks.config import Config
    from hooks.node.inventory import Inventory

__all__ = ["command"]

_SETTINGS: Final = {"help_option_names": ["-?", "--help", "--usage"]}


class _Global(NamedTuple):
    """The flags before the command."""

    debug: str | None
    load_kmods: bool
    root: str | None


class _Group(click.Group):
    """A group whose ``--user`` may have a value behind ``=`` and has none otherwise."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of a command line, without those for privileges that are never given up.

        click would take the next word for the value.
        """
        end = next((n for n, word in enumerate(args) if word in self.commands), len(args))
        kept = [word for word in args[:end] if not _is_user(word)]
        if len(kept) < end:
            _note("--user", "no privileges are given up")
        return super().parse_args(ctx, kept + args[end:])


def _is_user(word: str) -> bool:
    return word == "--user" or word.startswith(("--user=", "-u"))


def _note(flag: str, why: str) -> None:
    sys.stderr.write(f"nvidia-container-cli: {flag} changes nothing here: {why}\n")


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001, FBT001 - click's signature
    if value and not ctx.resilient_parsing:
        _tell_version()
        ctx.exit()


def _tell_version() -> None:
    from integration.compat import COMPATIBLE_WITH  # noqa: PLC0415 - one question in a hundred
    from shim import VERSION  # noqa: PLC0415

    facts = {
        "cli-version": COMPATIBLE_WITH,
        "lib-version": COMPATIBLE_WITH,
        "build date": "",
        "build revision": f"nvshim {VERSION}",
        "build compiler": f"{platform.python_implementation()} {platform.python_version()}",
        "build platform": platform.machine(),
        "build flags": "",
    }
    for title, fact in facts.items():
        click.echo(f"{title}: {fact}".rstrip())


@click.group("nvidia-container-cli", cls=_Group, context_settings=_SETTINGS)
@click.option("-d", "--debug", metavar="FILE", help="Tell there where everything was found.")
@click.option("-k", "--load-kmods", is_flag=True, help="Load kernel modules and make nodes first.")
@click.option("-r", "--root", metavar="PATH", help="Where the driver is.")
@click.option("-u", "--user", is_flag=True, expose_value=False, help="Changes nothing.")
@click.option("-l", "--ldcache", metavar="FILE", help="Changes nothing.")
@click.option("-n", "--no-pivot", is_flag=True, help="Changes nothing.")
@click.option("--no-create-imex-channels", is_flag=True, help="Changes nothing.")
@click.option(
    "-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Say which version this is.",
)  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context, /, *, debug: str | None, load_kmods: bool, root: str | None, **idle: Any
) -> None:
    """Say of the driver and the GPUs what nvidia-container-cli says."""
    ctx.obj = _Global(debug, load_kmods, root)
    if idle["ldcache"]:
        _note("--ldcache", "libraries are found in the driver's directories")
    if idle["no_pivot"]:
        _note("--no-pivot", "no container is entered")
    if idle["no_create_imex_channels"]:
        _note("--no-create-imex-channels", "IMEX channels are not made")


def _look(given: _Global) -> tuple[Inventory, Config]:
    """What the node has, with modules loaded and nodes made if that was asked."""
    from api.errors import NvshimError  # noqa: PLC0415 - after the options have been read
    from api.values import changed  # noqa: PLC0415
    from hooks.config import load_config  # noqa: PLC0415
    from integration.compat.container_cli import log_lines  # noqa: PLC0415
    from integration.devices.creating import Wish, create  # noqa: PLC0415
    from integration.inventory import inventory_of  # noqa: PLC0415

    config = load_config()
    if given.root is not None:
        config = changed(config, driver_root=os.path.abspath(given.root))
    if given.load_kmods:
        try:
            create(config, Wish(modules=True, links=False))
        except NvshimError as error:
            # As the original, which goes on with what there is.
            sys.stderr.write(f"{error}\n")
    inventory = inventory_of(config)
    if given.debug is not None:
        _write_log(given.debug, [*log_lines(inventory)])
    return inventory, config


def _write_log(path: str, lines: list[str]) -> None:
    from api.errors import one_line  # noqa: PLC0415 - as above
    from integration.compat.errors import DebugLogUnwritable  # noqa: PLC0415

    head = "\n-- WARNING, these lines are for people, and may change --\n\n"
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(head + "".join(f"{one_line(line)}\n" for line in lines))
    except OSError as error:
        raise DebugLogUnwritable(
            f"--debug={path}", found=error.strerror or str(error), do="name another file"
        ) from error


@command.command("info")
@click.option("--csv", is_flag=True, help="As tables of commas.")
@click.pass_obj
def info(given: _Global, *, csv: bool) -> None:
    """Report information about the driver and devices."""
    from integration.compat.container_cli import info_text  # noqa: PLC0415 - as above

    inventory, _ = _look(given)
    sys.stdout.write(info_text(inventory, csv=csv))


@command.command("list")
@click.option("-d", "--device", "devices", multiple=True, metavar="ID", callback=flatten,
              help="Device nodes of these devices.")  # fmt: skip
@click.option("-l", "--libraries", is_flag=True, help="Driver libraries.")
@click.option("-b", "--binaries", is_flag=True, help="Driver programs.")
@click.option("-i", "--ipcs", is_flag=True, help="Sockets of the driver's services.")
@click.option("-f", "--firmwares", is_flag=True, help="Driver firmware.")
@click.option("--compat32", is_flag=True, help="32-bit libraries as well.")
@click.option("--mig-config", multiple=True, metavar="ID", callback=flatten,
              help="Files to configure MIG devices of these GPUs.")  # fmt: skip
@click.option("--mig-monitor", multiple=True, metavar="ID", callback=flatten,
              help="Files to monitor MIG devices of these GPUs.")  # fmt: skip
@click.option("--imex-channel", "imex_channels", multiple=True, metavar="ID", callback=flatten,
              help="IMEX channels.")  # fmt: skip
@click.pass_obj
def list_(given: _Global, /, **listed: Any) -> None:
    """List driver components; all of them if none is asked for."""
    from integration.compat.container_cli import Listed, list_paths  # noqa: PLC0415 - as above

    listed["devices"] = listed["devices"] or None
    asked = Listed(**listed) if any(listed.values()) else Listed.everything()
    inventory, config = _look(given)
    paths = list_paths(inventory, config, asked)
    sys.stdout.write("".join(f"{path}\n" for path in paths))


@command.command("configure", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def configure(words: tuple[str, ...]) -> None:
    """Has no counterpart: the shim gives a container its GPUs before it starts."""
    from integration.compat.errors import NoCounterpart  # noqa: PLC0415 - as above

    raise NoCounterpart(
        f"nvidia-container-cli configure {' '.join(words)}".rstrip(),
        found="containers are complete before they start; nothing is mounted into one that is",
        do="run the container with the shim (nvshim configure), or with a CDI spec "
        "(nvshim cdi generate)",
    )


@command.command("version", hidden=True)
def version() -> None:
    """Say which version this is."""
    _tell_version()
