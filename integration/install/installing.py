"""The functions behind the commands: they survey, plan, and run the steps under the lock.

Each returns a dict; its keys are a public interface.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hooks.config import Config
from integration.install import checks, copying, planning, steps
from integration.install import uninstall as removal
from integration.install.effects import Installer, Outcome, locked
from integration.install.errors import SourceBroken
from integration.install.selftest import find_runtime
from integration.install.survey import Survey, take_survey
from integration.install.trees import own_tree, problem_of
from integration.install_layout import InstallLayout
from integration.tree import Tree

_POLL: Final = 0.5


@dataclass(frozen=True, slots=True)
class InstallOptions:
    """What to install, and how."""

    layout: InstallLayout
    source: str = ""  # a tree or an archive; empty for the tree that this program is part of
    use: str = ""  # switch to this installed version instead; empty for none
    rollback: bool = False  # switch to the previous version instead
    test: bool = True  # whether the new version has to start a container first
    keep: int = planning.KEEP  # how many other unused trees to keep
    installer: Installer = field(
        default_factory=lambda: Installer(InstallLayout())
    )  # runs the steps


def install(options: InstallOptions, *, dry_run: bool = False) -> dict[str, Any]:
    """Install a tree, or switch to an installed one.

    Args:
        options: what to install, and how.
        dry_run: whether to only report what would be done.

    Returns:
        The current version, and what was done.

    Raises:
        InstallError: it failed; the previous version stays current.
    """
    if not dry_run:
        checks.check_root()
    checks.check_place(options.layout)
    if dry_run:
        survey, plan, tree = _planned(options)
        return _answer(options.layout, survey, plan, None, tree)
    with locked(options.layout.prefix, make=True):
        checks.check_owners(options.layout.prefix)  # another user may have created it just now
        survey, plan, tree = _planned(options)
        outcome = options.installer.run(plan)
        return _answer(options.layout, take_survey(options.layout), plan, outcome, tree)


def collect(
    layout: InstallLayout, *, keep: int, installer: Installer, dry_run: bool = False
) -> dict[str, Any]:
    """Remove the trees that are no longer needed.

    Args:
        layout: the installation's directories.
        keep: how many unused trees besides the current one to keep.
        installer: runs the steps.
        dry_run: whether to only report what would be done.

    Raises:
        InstallError: it failed.
    """
    if dry_run:
        survey = take_survey(layout)
        return _answer(layout, survey, planning.plan_collection(survey, keep), None, None)
    checks.check_root()
    checks.check_owners(layout.prefix)
    with locked(layout.prefix, make=False):
        plan = planning.plan_collection(take_survey(layout), keep)
        outcome = installer.run(plan)
        return _answer(layout, take_survey(layout), plan, outcome, None)


def uninstall(
    layout: InstallLayout,
    *,
    installer: Installer,
    wait: float = 0.0,
    purge: Config | None = None,
    force: bool = False,
    engines_root: str = "",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Uninstall everything that running containers do not need.

    Args:
        layout: the installation's directories.
        installer: runs the steps.
        wait: seconds to wait for containers to exit.
        purge: the configuration whose state is removed as well; None to keep the state.
        force: whether to continue although an engine names the shim.
        engines_root: where to look for the engines' configuration; empty for this machine's root.
        dry_run: whether to only report what would be done.

    Returns:
        What is left, and why.

    Raises:
        InstallError: it failed; a second run continues.
    """
    if not dry_run:
        checks.check_root()
        checks.check_owners(layout.prefix)
        if not force:
            removal.check_unnamed(take_survey(layout), engines_root)
        _wait_for_containers(layout, wait, installer.say)
    with locked(layout.prefix, make=False):
        survey = take_survey(layout)
        plan = planning.plan_uninstallation(survey)
        shims = [shim for each in survey.installed for shim in each.shims]
        purged: list[str] = []
        if not dry_run:
            installer.run(plan)
            if purge is not None:
                purged = removal.purge(purge, in_use=bool(shims) or survey.may_miss_shims)
        after = survey if dry_run else take_survey(layout)
        return {
            "prefix": layout.prefix,
            "dry_run": dry_run,
            "complete": not dry_run and not after.installed and not survey.may_miss_shims,
            "steps": [str(step) for step in plan],
            "shims": sorted(shim.pid for shim in shims),
            "unseen_shims": survey.may_miss_shims,
            "left": [
                *(layout.path(each.name) for each in after.installed),
                *(layout.path(name) for name in after.foreign),
                *(link.path for link in after.links if link.target and link.ours),
            ],
            "needed_by_containerd": sorted(planning.needed_programs(survey)),
            "purged": purged,
            "mentioned_in": removal.mentions(engines_root),
        }


def _planned(options: InstallOptions) -> tuple[Survey, Sequence[steps.Step], Tree | None]:
    size = 0
    if options.use or options.rollback:
        survey = take_survey(options.layout)
        chosen = (
            planning.previous_version(survey)
            if options.rollback
            else planning.installed_version(survey, options.use)
        )
        if problem := problem_of(options.layout.path(chosen.name)):
            raise SourceBroken(
                f"to switch to {chosen.name}", found=problem, do="install that version again"
            )
        tree = chosen.tree
        request = planning.InstallRequest(name=chosen.name, test=options.test, keep=options.keep)
    else:
        source = os.path.abspath(options.source) if options.source else own_tree()
        tree, size = copying.inspect_source(source)
        checks.check_machine(tree)
        same = tree.digest
        survey = take_survey(options.layout, check=lambda path: problem_of(path, only=same))
        request = planning.InstallRequest(
            tree=tree, source=source, test=options.test, keep=options.keep
        )
    checks.check_links(survey)
    plan = planning.plan_installation(survey, request)
    if any(isinstance(step, steps.Put) for step in plan):
        checks.check_space(options.layout, size)
    if any(isinstance(step, steps.Test) for step in plan):
        find_runtime(options.installer.path, options.installer.runtime)
    return survey, plan, tree


def _answer(
    layout: InstallLayout,
    survey: Survey,
    plan: Sequence[steps.Step],
    outcome: Outcome | None,
    tree: Tree | None,
) -> dict[str, Any]:
    dry_run = outcome is None
    current = survey.named(survey.current)
    tree = tree or (current.tree if current else None)
    kinds = {type(step) for step in plan}
    return {
        "prefix": layout.prefix,
        "dry_run": dry_run,
        "changed": bool(plan) and (dry_run or not _only_kept(plan, outcome)),
        "version": tree.version if tree else None,
        "revision": tree.revision if tree else None,
        "current": survey.current or None,
        "previous": survey.previous or None,
        "tested": steps.Test in kinds,
        "steps": [str(step) for step in plan],
        "collected": list(outcome.collected) if outcome else [],
        "in_use": [
            {"name": each.name, "shims": len(each.shims)}
            for each in survey.installed
            # This command may be of the version that was current until now.
            if each.name != survey.current and {user.pid for user in each.holders} - {os.getpid()}
        ],
        "warnings": list(outcome.warnings) if outcome else [],
        "unseen_shims": survey.may_miss_shims,
        "links": [link.path for link in survey.links],
    }


def _only_kept(plan: Sequence[steps.Step], outcome: Outcome | None) -> bool:
    """Whether the plan only removed trees, and all of them are in use."""
    tried = [step.name for step in plan if isinstance(step, steps.Collect)]
    return outcome is not None and len(tried) == len(plan) and tried == outcome.in_use


def _wait_for_containers(layout: InstallLayout, seconds: float, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + seconds
    reported = False
    while time.monotonic() < deadline and any(each.shims for each in take_survey(layout).installed):
        if not reported:
            say("wait for containers to end")
            reported = True
        time.sleep(_POLL)
