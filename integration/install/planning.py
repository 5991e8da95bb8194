"""What has to be done: a survey and a wish in, steps out. Nothing is touched here.

Rules of an installation
- What killed installers left goes first: it may keep trees in use that nobody needs.
- A tree that is there already, with the same digest, and intact, is used as it is. One that is
  there and is not what it says is left alone, and a new one is placed beside it: shims may use it.
- The new tree is tested before anything leads to it. ``previous`` is set before ``current``: who is
  killed between the two has both lead to what is in effect, and loses nothing.
- Fork servers of other trees end: they would fork no shim of the new one, and hold the old.
- Trees that nothing leads to are collected: all but the newest ``keep``, of which ``previous`` is
  the first. Not if there may be shims that are not seen.

Rules of an uninstallation
- Without a shim everything goes: first the links, so that nothing new starts; then what they lead
  to; then the trees.
- While shims run, the path by which containerd has started them goes on leading to a shim, and
  ``nvshim`` stays to finish the job; all that is not needed for that goes.
- The trees of another's making, and files that nobody knows, stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from integration.install import steps
from integration.install.errors import NothingToGoBackTo, VersionNotInstalled
from integration.install_layout import CURRENT, PREVIOUS, SHIM, is_directory_name

if TYPE_CHECKING:
    from integration.install.survey import Installed, Survey
    from integration.tree import Tree

KEEP = 1
"""How many trees stay that are not in effect and that nothing uses."""


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """What an installation is to come to."""

    tree: Tree | None = None  # what is to be in effect
    source: str = ""  # where it is to be copied from; empty if it is installed
    name: str = ""  # of the installed one
    test: bool = True  # whether it has to start a container before it is in effect
    keep: int = KEEP  # how many others stay that nothing uses


def plan_installation(survey: Survey, request: InstallRequest) -> list[steps.Step]:
    """The steps after which a tree is in effect."""
    plan: list[steps.Step] = [steps.Clear(path) for path in survey.leftovers]
    name, new = request.name, False
    if not name and request.tree is not None:
        name, new = _directory_for(survey, request.tree)
    if new:
        plan.append(steps.Put(request.source, name))
    switch = name != survey.current
    if request.test and (new or switch):
        plan.append(steps.Test(name, new))
    if switch:
        if survey.current:
            plan.append(steps.Point(PREVIOUS, survey.current))
        plan.append(steps.Point(CURRENT, name))
    plan += [steps.Link(link.path, link.expected) for link in survey.links if not link.is_right]
    previous = survey.current if switch else survey.previous
    return plan + _cleanup_steps(
        survey, current=name, previous=previous, keep=request.keep, switched=switch
    )


def plan_collection(survey: Survey, keep: int = KEEP) -> list[steps.Step]:
    """The steps after which there is nothing that nobody needs.

    Args:
        survey: what is there.
        keep: how many trees stay that are not in effect and that nothing uses.
    """
    plan: list[steps.Step] = [steps.Clear(path) for path in survey.leftovers]
    return plan + _cleanup_steps(
        survey, current=survey.current, previous=survey.previous, keep=keep
    )


def plan_uninstallation(survey: Survey) -> list[steps.Step]:
    """The steps after which as little is there as running containers allow."""
    plan: list[steps.Step] = [steps.Clear(path) for path in survey.leftovers]
    names = tuple(each.name for each in survey.installed)
    ours = [link for link in survey.links if link.ours and link.target]
    if not _shims_run(survey):
        plan += [steps.Unlink(link.path) for link in ours]
        plan += [steps.Unlink(survey.layout.path(link)) for link in (CURRENT, PREVIOUS)]
        if names:
            plan.append(steps.EndForkServers(names))
        plan += [steps.Collect(name) for name in names]
        return [*plan, steps.RemovePrefix(survey.layout.prefix)]
    needed = needed_programs(survey)
    # With nvshim it is finished; and without the shim's own link nvshim would not know of it.
    keeps_links = any(link.path in needed for link in ours)
    if not keeps_links:
        plan += [steps.Unlink(link.path) for link in ours if os.path.basename(link.path) == SHIM]
    plan.append(steps.Unlink(survey.layout.path(PREVIOUS)))
    plan.append(steps.EndForkServers(names))
    plan += [
        steps.Collect(each.name)
        for each in survey.installed
        if each.name != survey.current and not each.holders
    ]
    return plan


def needed_programs(survey: Survey) -> frozenset[str]:
    """The paths of programs that containerd will execute, or look for, for shims that run.

    Args:
        survey: what is there. Of a shim whose path nobody has noted it is that of the link.
    """
    links = [link.path for link in survey.links if os.path.basename(link.path) == SHIM]
    found = set(links if survey.may_miss_shims else ())
    for each in survey.installed:
        for shim in each.shims:
            found.update([shim.asked_by] if shim.asked_by else links)
    return frozenset(found)


def installed_version(survey: Survey, version: str) -> Installed:
    """The tree that a person means.

    Args:
        survey: what is there.
        version: a version, or a directory's name, or the beginning of one.

    Raises:
        VersionNotInstalled: none is, or several are.
    """
    exact = [e for e in survey.installed if version in {e.name, e.tree.version if e.tree else ""}]
    found = exact or [each for each in survey.installed if each.name.startswith(version)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(each.name for each in (found or survey.installed)) or "nothing"
    raise VersionNotInstalled(
        f"version {version} below {survey.layout.prefix}",
        found=f"{len(found)} that it could be: {there}" if found else f"only {there}",
        do="name one by its directory" if found else "install it with --from",
    )


def previous_version(survey: Survey) -> Installed:
    """The tree that was in effect before.

    Raises:
        NothingToGoBackTo: there is none.
    """
    previous = survey.named(survey.previous)
    if previous is None:
        others = [each.name for each in survey.installed if each.name != survey.current]
        raise NothingToGoBackTo(
            f"the version before {survey.current or 'none'}",
            found=f"{PREVIOUS} leads to nothing",
            do=f"name one with --use: {', '.join(others)}" if others else "install one with --from",
        )
    return previous


def _directory_for(survey: Survey, tree: Tree) -> tuple[str, bool]:
    """Under which name a tree is, or would be, and whether it has to be placed there."""
    base = tree.name
    same = [
        each
        for each in survey.installed
        if each.tree is not None and each.tree.digest == tree.digest and not each.problem
    ]
    for each in same:
        if each.name == survey.current:
            return each.name, False
    if same:
        return same[0].name, False
    name, number = base, 1
    taken = {*(each.name for each in survey.installed), *survey.foreign}
    while name in taken:
        number += 1
        name = f"{base}.{number}"
    return name, True


def _cleanup_steps(
    survey: Survey, *, current: str, previous: str, keep: int, switched: bool = False
) -> list[steps.Step]:
    others = [each for each in survey.installed if each.name != current]
    plan: list[steps.Step] = []
    # Until the switch, more of them may have begun than there were when it was planned.
    with_servers = tuple(e.name for e in others if switched or len(e.users) > len(e.holders))
    if with_servers:
        plan.append(steps.EndForkServers(with_servers))
    if survey.may_miss_shims:
        return plan
    first = [each for each in others if each.name == previous]
    newest = sorted((e for e in others if e.name != previous), key=_placed, reverse=True)
    unused = [*first, *newest][keep:]
    return plan + [steps.Collect(name) for name in _names(_collectable(unused))]


def _collectable(installed: Iterable[Installed]) -> list[Installed]:
    return [e for e in installed if not e.holders and is_directory_name(e.name)]


def _names(installed: Iterable[Installed]) -> Sequence[str]:
    return [each.name for each in installed]


def _placed(installed: Installed) -> int:
    return installed.placed


def _shims_run(survey: Survey) -> bool:
    return survey.may_miss_shims or any(each.shims for each in survey.installed)
