"""The calls that the commands make: look, plan, and take the steps, under the lock.

Each answers with a dict whose keys are an interface.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hooks.config import Config
from integration.install import checks, copying, planning, steps
from integration.install import uninstall as leaving
from integration.install.effects import Done, Workshop, locked
from integration.install.errors import SourceBroken
from integration.install.selftest import find_runtime
from integration.install.survey import Survey, look
from integration.install.trees import own_tree, problem_of
from integration.install_places import Place
from integration.tree import Tree

_POLL: Final = 0.5


@dataclass(frozen=True, slots=True)
class Installation:
    """What a person wants installed."""

    place: Place  # where
    source: str = ""  # a tree or an archive of one; empty for the tree that this program is part of
    use: str = ""  # the version of an installed tree instead; empty for none
    rollback: bool = False  # the one before instead
    test: bool = True  # whether it has to start a container first
    keep: int = planning.KEEP  # how many other trees stay that nothing uses
    workshop: Workshop = field(default_factory=lambda: Workshop(Place()))  # how steps are taken


def install(wanted: Installation, *, dry_run: bool = False) -> dict[str, Any]:
    """Have a tree in effect.

    Args:
        wanted: which, and how.
        dry_run: whether only to say what would be done.

    Returns:
        What is in effect now, and what was done for it.

    Raises:
        InstallError: it could not be done; what was in effect still is.
    """
    if not dry_run:
        checks.check_root()
    checks.check_place(wanted.place)
    if dry_run:
        survey, plan, tree = _planned(wanted)
        return _answer(wanted.place, survey, plan, None, tree)
    with locked(wanted.place.prefix, make=True):
        checks.check_owners(wanted.place.prefix)  # somebody else may have made it meanwhile
        survey, plan, tree = _planned(wanted)
        done = wanted.workshop.take(plan)
        return _answer(wanted.place, look(wanted.place), plan, done, tree)


def collect(
    place: Place, *, keep: int, workshop: Workshop, dry_run: bool = False
) -> dict[str, Any]:
    """Remove the trees that nobody needs.

    Args:
        place: where.
        keep: how many stay that are not in effect and that nothing uses.
        workshop: how steps are taken.
        dry_run: whether only to say what would be done.

    Raises:
        InstallError: it could not be done.
    """
    if dry_run:
        survey = look(place)
        return _answer(place, survey, planning.plan_collection(survey, keep), None, None)
    checks.check_root()
    checks.check_owners(place.prefix)
    with locked(place.prefix, make=False):
        plan = planning.plan_collection(look(place), keep)
        done = workshop.take(plan)
        return _answer(place, look(place), plan, done, None)


def uninstall(
    place: Place,
    *,
    workshop: Workshop,
    wait: float = 0.0,
    purge: Config | None = None,
    force: bool = False,
    engines_root: str = "",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Take away what running containers do not need.

    Args:
        place: where.
        workshop: how steps are taken.
        wait: seconds to wait for the containers to end.
        purge: whose state is removed too; None to leave it.
        force: whether to do it also if an engine names the shim.
        engines_root: where the engines' configuration is; empty for this machine's.
        dry_run: whether only to say what would be done.

    Returns:
        What is left, and why.

    Raises:
        InstallError: it could not be done; a second run goes on.
    """
    if not dry_run:
        checks.check_root()
        checks.check_owners(place.prefix)
        if not force:
            leaving.check_unnamed(look(place), engines_root)
        _wait_for_containers(place, wait, workshop.say)
    with locked(place.prefix, make=False):
        survey = look(place)
        plan = planning.plan_uninstallation(survey)
        shims = [shim for each in survey.installed for shim in each.shims]
        purged: list[str] = []
        if not dry_run:
            workshop.take(plan)
            if purge is not None:
                purged = leaving.purge(purge, in_use=bool(shims) or survey.blind)
        after = survey if dry_run else look(place)
        return {
            "prefix": place.prefix,
            "dry_run": dry_run,
            "complete": not dry_run and not after.installed and not survey.blind,
            "steps": [str(step) for step in plan],
            "shims": sorted(shim.pid for shim in shims),
            "unseen_shims": survey.blind,
            "left": [
                *(place.path(each.name) for each in after.installed),
                *(place.path(name) for name in after.foreign),
                *(link.path for link in after.links if link.target and link.ours),
            ],
            "needed_by_containerd": sorted(planning.asked_paths(survey)),
            "purged": purged,
            "mentioned_in": leaving.mentions(engines_root),
        }


def _planned(wanted: Installation) -> tuple[Survey, Sequence[steps.Step], Tree | None]:
    size = 0
    if wanted.use or wanted.rollback:
        survey = look(wanted.place)
        chosen = (
            planning.previous_version(survey)
            if wanted.rollback
            else planning.installed_version(survey, wanted.use)
        )
        if problem := problem_of(wanted.place.path(chosen.name)):
            raise SourceBroken(
                f"to switch to {chosen.name}", found=problem, do="install that version again"
            )
        tree = chosen.tree
        wish = planning.Wish(name=chosen.name, test=wanted.test, keep=wanted.keep)
    else:
        source = os.path.abspath(wanted.source) if wanted.source else own_tree()
        tree, size = copying.look_at(source)
        checks.check_machine(tree)
        same = tree.digest
        survey = look(wanted.place, check=lambda path: problem_of(path, only=same))
        wish = planning.Wish(tree=tree, source=source, test=wanted.test, keep=wanted.keep)
    checks.check_links(survey)
    plan = planning.plan_installation(survey, wish)
    if any(isinstance(step, steps.Put) for step in plan):
        checks.check_space(wanted.place, size)
    if any(isinstance(step, steps.Test) for step in plan):
        find_runtime(wanted.workshop.path, wanted.workshop.runtime)
    return survey, plan, tree


def _answer(
    place: Place,
    survey: Survey,
    plan: Sequence[steps.Step],
    done: Done | None,
    tree: Tree | None,
) -> dict[str, Any]:
    dry_run = done is None
    current = survey.named(survey.current)
    tree = tree or (current.tree if current else None)
    kinds = {type(step) for step in plan}
    return {
        "prefix": place.prefix,
        "dry_run": dry_run,
        "changed": bool(plan) and (dry_run or not _only_kept(plan, done)),
        "version": tree.version if tree else None,
        "revision": tree.revision if tree else None,
        "current": survey.current or None,
        "previous": survey.previous or None,
        "tested": steps.Test in kinds,
        "steps": [str(step) for step in plan],
        "collected": list(done.collected) if done else [],
        "in_use": [
            {"name": each.name, "shims": len(each.shims)}
            for each in survey.installed
            if each.name != survey.current and each.holders
        ],
        "warnings": list(done.warnings) if done else [],
        "unseen_shims": survey.blind,
        "links": [link.path for link in survey.links],
    }


def _only_kept(plan: Sequence[steps.Step], done: Done | None) -> bool:
    """Whether all that was to be done was to remove trees, and all are used."""
    tried = [step.name for step in plan if isinstance(step, steps.Collect)]
    return done is not None and len(tried) == len(plan) and tried == done.in_use


def _wait_for_containers(place: Place, seconds: float, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + seconds
    told = False
    while time.monotonic() < deadline and any(each.shims for each in look(place).installed):
        if not told:
            say("wait for containers to end")
            told = True
        time.sleep(_POLL)
