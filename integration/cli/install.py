"""``nvshim install``: install or activate a version, and remove unused ones."""

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
from integration.install.effects import Installer
from integration.install.survey import take_survey
from integration.install_layout import PREFIX, InstallLayout


def with_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the installation's location to a command, which gets a ``place``."""

    @functools.wraps(command)
    def placed(*args: Any, prefix: str, bindir: str | None, no_links: bool, **kwargs: Any) -> Any:
        if not prefix:  # from an unset shell variable; it would mean the working directory
            raise click.BadParameter("It is empty.", param_hint="--prefix")
        return command(*args, layout=InstallLayout.of(prefix, "" if no_links else bindir), **kwargs)

    return _PLACE(placed)


_PLACE = stacked(
    click.option("--prefix", metavar="DIR", default=PREFIX, show_default=True,
                 help="The directory of the installed versions."),
    click.option("--bindir", metavar="DIR",
                 help="The directory, in containerd's PATH, for links to the programs; by default"
                 " where they are now, or /usr/local/bin."),
    click.option("--no-links", is_flag=True,
                 help="Create no links; for engines configured with the program's path."),
)  # fmt: skip


def _terminate(*_: object) -> NoReturn:
    """Exit on SIGTERM as on an error, so that a half-finished installation is rolled back."""
    raise SystemExit(exits.TERMINATED)


@completing
def _versions(given: Mapping[str, Any]) -> list[str]:
    """Complete the installed versions except the current one."""
    survey = take_survey(InstallLayout.of(given.get("prefix") or PREFIX, None))
    return [each.name for each in survey.installed if each.name != survey.current]


@click.command("install")
@click.option(
    "--from",
    "source",
    metavar="TREE|TARBALL",
    default="",
    help="Install this tree or tarball; by default the tree that this nvshim runs from.",
)
@click.option(
    "--use", metavar="VERSION", default="", shell_complete=_versions,
    help="Switch to an installed version.",
)  # fmt: skip
@click.option("--rollback", is_flag=True, help="Switch to the previous version.")
@click.option("--collect", is_flag=True, help="Only remove unused versions.")
@with_place
@click.option("--no-self-test", is_flag=True, help="Do not start a test container first.")
@click.option("--runtime", metavar="PROGRAM", default="", help="Test with this runc or crun.")
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Keep this many unused versions in addition to the current one.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done and do nothing.")
@with_output
def command(
    output: Output,
    *,
    collect: bool,
    layout: InstallLayout,
    no_self_test: bool,
    runtime: str,
    keep: int,
    dry_run: bool,
    **which: Any,
) -> None:
    """Install a version, or switch between installed ones.

    A test container is started with the new version before it is activated. Running containers are
    not touched: each keeps the version it was started with.
    """
    if sum(map(bool, (collect, *which.values()))) > 1:
        raise click.UsageError("Use only one of --from, --use, --rollback and --collect.")

    signal.signal(signal.SIGTERM, _terminate)
    with Progress(output) as progress:
        installer = Installer(layout, say=progress.update, runtime=runtime)
        if collect:
            answer = installing.collect(layout, keep=keep, installer=installer, dry_run=dry_run)
        else:
            options = installing.InstallOptions(
                layout, test=not no_self_test, keep=keep, installer=installer, **which
            )
            answer = installing.install(options, dry_run=dry_run)
    output.text("\n".join(map(printable, _lines(answer, switched=not collect))), answer)
    found_if(dry_run and answer["steps"])


def _users(shims: int) -> str:
    return f"it is used by {counted(shims, 'shim') if shims else 'processes that are not shims'}"


def _lines(answer: dict[str, Any], *, switched: bool) -> list[str]:
    if answer["dry_run"]:
        return answer["steps"] or ["nothing to do"]
    lines = []
    if answer["current"]:
        tested = "; a test container was started with it" if answer["tested"] else ""
        news = "is now current" if answer["changed"] and switched else "is still current"
        lines.append(f"{answer['current']} below {answer['prefix']} {news}{tested}")
    else:
        lines.append(f"no version is current below {answer['prefix']}")
    if answer["previous"]:
        lines.append(f"kept {answer['previous']} for nvshim install --rollback")
    lines += [f"removed {name}" for name in answer["collected"]]
    lines += [f"kept {each['name']}: {_users(each['shims'])}" for each in answer["in_use"]]
    lines += answer["warnings"]
    if answer["unseen_shims"]:
        lines.append("some shims may not be visible from here, so no version was removed")
    return lines
