"""``nvshim install``: have a version in effect, and the ones that nobody needs removed."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import click

from api.errors import printable
from integration import exits
from integration.cli.options import completing, found_if, stacked, with_output
from integration.cli.output import Output, counted
from integration.cli.progress import Progress
from integration.install import installing
from integration.install.effects import Workshop
from integration.install.survey import look
from integration.install_places import PREFIX, Place


def with_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say where an installation is; it gets a ``place``."""

    @functools.wraps(command)
    def placed(*args: Any, prefix: str, bindir: str | None, no_links: bool, **kwargs: Any) -> Any:
        return command(*args, place=Place.of(prefix, "" if no_links else bindir), **kwargs)

    return _PLACE(placed)


_PLACE = stacked(
    click.option("--prefix", metavar="DIR", default=PREFIX, show_default=True,
                 help="Below which the versions are."),
    click.option("--bindir", metavar="DIR",
                 help="Where the links to the programs are, on containerd's PATH; by default"
                 " where they are already, or in /usr/local/bin."),
    click.option("--no-links", is_flag=True,
                 help="No links; for engines that are given the program's path."),
)  # fmt: skip


def _end(*_: object) -> NoReturn:
    """End as on an error: what is half done is taken back."""
    raise SystemExit(exits.TERMINATED)


@completing
def _versions(given: Mapping[str, Any]) -> list[str]:
    """The versions that are there, but for the one in effect."""
    survey = look(Place.of(given.get("prefix") or PREFIX, None))
    return [each.name for each in survey.installed if each.name != survey.current]


@click.command("install")
@click.option(
    "--from",
    "source",
    metavar="TREE|TARBALL",
    default="",
    help="What to install; by default the tree that this nvshim is part of.",
)
@click.option(
    "--use", metavar="VERSION", default="", shell_complete=_versions,
    help="Switch to a version that is there.",
)  # fmt: skip
@click.option("--rollback", is_flag=True, help="Switch to the version before.")
@click.option("--collect", is_flag=True, help="Only remove the versions that nothing needs.")
@with_place
@click.option("--no-self-test", is_flag=True, help="Start no container before switching.")
@click.option("--runtime", metavar="PROGRAM", default="", help="The runc or crun to test with.")
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="How many versions stay that nothing uses, besides the current one.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@with_output
def command(
    output: Output,
    *,
    collect: bool,
    place: Place,
    no_self_test: bool,
    runtime: str,
    keep: int,
    dry_run: bool,
    **which: Any,
) -> None:
    """Install a version, or switch between installed ones.

    The new one starts a container before anything is switched to it. Containers that run are not
    touched: each keeps the version that it was started with.
    """
    if sum(map(bool, (collect, *which.values()))) > 1:
        raise click.UsageError("--from, --use, --rollback and --collect exclude each other")

    signal.signal(signal.SIGTERM, _end)
    with Progress(output) as progress:
        workshop = Workshop(place, say=progress.say, runtime=runtime)
        if collect:
            answer = installing.collect(place, keep=keep, workshop=workshop, dry_run=dry_run)
        else:
            wanted = installing.Installation(
                place, test=not no_self_test, keep=keep, workshop=workshop, **which
            )
            answer = installing.install(wanted, dry_run=dry_run)
    output.text("\n".join(map(printable, _lines(answer, switched=not collect))), answer)
    found_if(dry_run and answer["steps"])


def _users(shims: int) -> str:
    return f"it is used by {counted(shims, 'shim') if shims else 'processes that are not shims'}"


def _lines(answer: dict[str, Any], *, switched: bool) -> list[str]:
    if answer["dry_run"]:
        return answer["steps"] or ["nothing to do"]
    lines = []
    if answer["current"]:
        tested = ", which has started a container" if answer["tested"] else ""
        news = "is in effect now" if answer["changed"] and switched else "is in effect, as it was"
        lines.append(f"{answer['current']} below {answer['prefix']} {news}{tested}")
    else:
        lines.append(f"no version is in effect below {answer['prefix']}")
    if answer["previous"]:
        lines.append(f"{answer['previous']} stays for nvshim install --rollback")
    lines += [f"removed {name}" for name in answer["collected"]]
    lines += [f"{each['name']} stays: {_users(each['shims'])}" for each in answer["in_use"]]
    lines += answer["warnings"]
    if answer["unseen_shims"]:
        lines.append("there may be shims that are not seen from here, so no version was removed")
    return lines
