"""Report what is installed, and what is wrong with it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

from integration.install import uninstall as removal
from integration.install.effects import is_locked
from integration.install.survey import Installed, Survey, take_survey
from integration.install.trees import problem_of
from integration.install.usage import Role
from integration.install_layout import CURRENT, InstallLayout


def status(
    layout: InstallLayout, *, verify: bool = False, engines_root: str = ""
) -> dict[str, Any]:
    """Return the state of an installation and its problems.

    Args:
        layout: the installation's directories.
        verify: whether to verify every file of every tree.
        engines_root: where to look for the engines' configuration; empty for this machine's root.

    Returns:
        The report; ``problems`` has a line for each problem.
    """
    busy = is_locked(layout.prefix)
    survey = take_survey(layout, check=problem_of if verify else None)
    mentioned = removal.mentions(engines_root)
    return {
        "prefix": layout.prefix,
        "bindir": layout.bindir or None,
        "current": survey.current or None,
        "previous": survey.previous or None,
        "verified": verify,
        "versions": [_row(each, survey) for each in reversed(survey.installed)],
        "links": [
            {
                "path": link.path,
                "target": link.target or None,
                "wanted": link.expected,
                "right": link.is_right,
            }
            for link in survey.links
        ],
        "unseen_shims": survey.may_miss_shims,
        "being_changed": busy,
        "mentioned_in": mentioned,
        "problems": problems(replace(survey, leftovers=()) if busy else survey, mentioned),
    }


def problems(survey: Survey, mentioned: list[str]) -> list[str]:
    """Return one line for each problem, with a remedy."""
    found = []
    if not survey.installed:
        found.append(f"nothing is installed below {survey.layout.prefix}")
    elif not survey.current:
        found.append(f"no version is current: {CURRENT} points to none; run nvshim install --use")
    for each in survey.installed:
        if each.tree is None:
            found.append(f"{each.name} has no list of its files; install that version again")
        elif each.problem:
            found.append(f"{each.name}: {each.problem}; install that version again")
    if survey.installed:
        found += [
            f"{link.path} points to {link.target}, not to {link.expected}"
            if link.target
            else f"{link.path} is missing"
            if link.ours
            else f"{link.path} is not a link of nvshim"
            for link in survey.links
            if not link.is_right
        ]
    found += [
        f"{path} was left by an interrupted installation; the next one removes it"
        for path in survey.leftovers
    ]
    if not survey.current:
        found += [f"{path} names a shim that does not exist" for path in mentioned]
    return found


def _row(installed: Installed, survey: Survey) -> dict[str, Any]:
    # This process uses its own tree, which is of no interest.
    counts = Counter(user.role for user in installed.users if user.pid != os.getpid())
    tree = installed.tree
    return {
        "name": installed.name,
        "version": tree.version if tree else None,
        "revision": (tree.revision or None) if tree else None,
        "architecture": tree.architecture if tree else None,
        "python": tree.python if tree else None,
        "digest": tree.digest if tree else None,
        "role": _role(installed.name, survey),
        "shims": counts[Role.SHIM],
        "fork_servers": counts[Role.FORK_SERVER],
        "other_processes": counts[Role.OTHER] + counts[Role.SPARE],
        "problem": installed.problem or None,
    }


def _role(name: str, survey: Survey) -> str | None:
    if name == survey.current:
        return "current"
    return "previous" if name == survey.previous else None
