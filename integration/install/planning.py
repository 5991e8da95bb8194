"""Decide on steps from a survey and a request. This module touches nothing.

Rules for an installation
- First remove what killed installers left behind: it may keep unneeded trees in use.
- An intact tree with the same digest is used as it is. A damaged one stays, because shims may use
  it; the new tree is installed next to it.
- The new tree is tested before any link points to it. ``previous`` is set before ``current``: if
  the installer is killed in between, both point to the current version, and nothing is lost.
- Fork servers of other trees are stopped, because they would start shims of their own version and
  keep their trees in use.
- Of the trees without a link, all but the newest ``keep`` are removed; ``previous`` counts as the
  newest. None is removed if there may be shims that we cannot see.

Rules for an uninstallation
- If no shim runs, everything is removed: first the links, so that nothing new starts, then
  ``current`` and ``previous``, then the trees.
- While shims run, the path that containerd started them with keeps pointing to a shim, and
  ``nvshim`` stays to finish the job. Everything else is removed.
- Files that we did not create stay.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from integration.install import steps
from integration.install.errors import NothingToGoBackTo, VersionNotInstalled
from integration.install.survey import Installed, Survey
from integration.install_layout import BINDIRS, CURRENT, LINKED, PREVIOUS, SHIM, is_directory_name
from integration.tree import Tree

KEEP = 1
"""How many unused trees to keep besides the current one."""


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """What the installation should become."""

    tree: Tree | None = None  # the tree that becomes current
    source: str = ""  # where to copy it from; empty if it is installed
    name: str = ""  # its directory, if it is installed
    test: bool = True  # whether it has to start a container first
    keep: int = KEEP  # how many other unused trees to keep


def plan_installation(survey: Survey, request: InstallRequest) -> list[steps.Step]:
    """Return the steps that make a tree current."""
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
    plan += _record_steps(survey)
    plan += [steps.Link(link.path, link.expected) for link in survey.links if not link.is_right]
    previous = survey.current if switch else survey.previous
    return plan + _cleanup_steps(
        survey, current=name, previous=previous, keep=request.keep, switched=switch
    )


def plan_collection(survey: Survey, keep: int = KEEP) -> list[steps.Step]:
    """Return the steps that remove what is no longer needed.

    Args:
        survey: the installation.
        keep: how many unused trees besides the current one to keep.
    """
    plan: list[steps.Step] = [steps.Clear(path) for path in survey.leftovers]
    return plan + _cleanup_steps(
        survey, current=survey.current, previous=survey.previous, keep=keep
    )


def plan_uninstallation(survey: Survey) -> list[steps.Step]:
    """Return the steps that remove as much as running containers allow."""
    plan: list[steps.Step] = [steps.Clear(path) for path in survey.leftovers]
    # A mistaken prefix may be a directory of others, which has a link of the same name as well.
    names = tuple(each.name for each in survey.installed if is_directory_name(each.name))
    ours = [link for link in survey.links if link.ours and link.target]
    if not _shims_run(survey):
        plan += [steps.Unlink(link.path) for link in ours]
        own = (*survey.pointers, *survey.recorded)
        plan += [steps.Unlink(survey.layout.path(link)) for link in own]
        if names:
            plan.append(steps.EndForkServers(names))
        plan += [steps.Collect(name) for name in names]
        return [*plan, steps.RemovePrefix(survey.layout.prefix)]
    needed = needed_programs(survey)
    # nvshim is needed to finish the job; without the shim's link it would be of no use.
    keeps_links = any(link.path in needed for link in ours)
    if not keeps_links:
        plan += [steps.Unlink(link.path) for link in ours if os.path.basename(link.path) == SHIM]
    if PREVIOUS in survey.pointers:
        plan.append(steps.Unlink(survey.layout.path(PREVIOUS)))
    plan.append(steps.EndForkServers(names))
    plan += [
        steps.Collect(each.name)
        for each in _collectable(survey.installed)
        if each.name != survey.current
    ]
    return plan


def needed_programs(survey: Survey) -> frozenset[str]:
    """Return the paths of programs that containerd will execute or look for, for running shims.

    Args:
        survey: the installation. A shim without a recorded path is assumed to use the link's.
    """
    links = [link.path for link in survey.links if os.path.basename(link.path) == SHIM]
    found = set(links if survey.may_miss_shims else ())
    for each in survey.installed:
        for shim in each.shims:
            found.update([shim.asked_by] if shim.asked_by else links)
    return frozenset(found)


def installed_version(survey: Survey, version: str) -> Installed:
    """Return the installed tree that a version refers to.

    Args:
        survey: the installation.
        version: a version, or a directory's name, or the start of one.

    Raises:
        VersionNotInstalled: none matches, or several do.
    """
    exact = [e for e in survey.installed if version in {e.name, e.tree.version if e.tree else ""}]
    found = exact or [each for each in survey.installed if each.name.startswith(version)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(each.name for each in (found or survey.installed)) or "nothing"
    raise VersionNotInstalled(
        f"to find version {version} below {survey.layout.prefix}",
        found=f"{len(found)} match: {there}" if found else f"only {there} is installed",
        do="name one by its directory" if found else "install it with --from",
    )


def previous_version(survey: Survey) -> Installed:
    """Return the tree that was current before.

    Raises:
        NothingToGoBackTo: there was no tree before.
    """
    previous = survey.named(survey.previous)
    if previous is None:
        others = [each.name for each in survey.installed if each.name != survey.current]
        raise NothingToGoBackTo(
            f"to go back to the version before {survey.current or 'none'}",
            found=f"{PREVIOUS} points to nothing",
            do=f"name one with --use: {', '.join(others)}" if others else "install one with --from",
        )
    return previous


def _directory_for(survey: Survey, tree: Tree) -> tuple[str, bool]:
    """Return the name of a tree's directory, and whether the tree has to be copied there."""
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


def _record_steps(survey: Survey) -> list[steps.Step]:
    """Return the steps that record where links are, and forget directories without any."""
    stale = [name for name, directory in survey.recorded.items() if not directory]
    plan: list[steps.Step] = []
    bindir = survey.layout.bindir
    if bindir not in ("", *BINDIRS, *survey.recorded.values()):
        numbered = (f"{LINKED}.{number}" for number in itertools.count(2))
        names = itertools.chain([LINKED], numbered)
        name = next(n for n in names if not survey.recorded.get(n) and n not in survey.foreign)
        plan.append(steps.Point(name, bindir))
        stale = [other for other in stale if other != name]
    return plan + [steps.Unlink(survey.layout.path(name)) for name in stale]


def _cleanup_steps(
    survey: Survey, *, current: str, previous: str, keep: int, switched: bool = False
) -> list[steps.Step]:
    others = [each for each in survey.installed if each.name != current]
    plan: list[steps.Step] = []
    # More fork servers may start between the plan and the switch.
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
