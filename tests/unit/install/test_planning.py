"""The steps that are planned for each existing installation."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from integration.install import steps
from integration.install.errors import NothingToGoBackTo, VersionNotInstalled
from integration.install.planning import (
    InstallRequest,
    installed_version,
    needed_programs,
    plan_collection,
    plan_installation,
    plan_uninstallation,
    previous_version,
)
from integration.install.survey import Installed, Link, Survey
from integration.install.usage import Role, User
from integration.install_layout import InstallLayout
from integration.tree import Tree
from tests.harness.raising import raises

PLACE: Final = InstallLayout("/opt/x", "/usr/local/bin")
SHIM_LINK: Final = "/usr/local/bin/containerd-shim-nvidia-v1"


def _tree(version: str, digit: str = "a") -> Tree:
    return Tree(
        path="", version=version, revision="", architecture="amd64", python="3.11.2",
        digest=digit * 64, files={}, programs=frozenset(),
    )  # fmt: skip


def _installed(tree: Tree, *users: User, placed: int = 0, problem: str = "") -> Installed:
    return Installed(tree.name, tree, placed, users, problem)


def _links(*, right: bool = True) -> tuple[Link, ...]:
    return tuple(
        Link(path, wanted, wanted if right else "", ours=True)
        for path, wanted in PLACE.links.items()
    )


def _user(role: Role, tree: Tree, asked_by: str = "") -> User:
    return User(7, role, PLACE.path(tree.name), asked_by)


OLD, NEW, OLDER = _tree("1.0"), _tree("2.0", "b"), _tree("0.9", "c")
EMPTY: Final = Survey(PLACE, links=_links(right=False))
WITH_OLD: Final = Survey(PLACE, (_installed(OLD),), current=OLD.name, links=_links())


def test_the_first_installation_tests_before_anything_leads_to_the_tree() -> None:
    assert plan_installation(EMPTY, InstallRequest(tree=NEW, source="/src")) == [
        steps.Put("/src", NEW.name),
        steps.Test(NEW.name, new=True),
        steps.Point("current", NEW.name),
        *(steps.Link(path, wanted) for path, wanted in PLACE.links.items()),
    ]


def test_an_upgrade_remembers_what_was_in_effect_before_it_switches() -> None:
    assert plan_installation(WITH_OLD, InstallRequest(tree=NEW, source="/src")) == [
        steps.Put("/src", NEW.name),
        steps.Test(NEW.name, new=True),
        steps.Point("previous", OLD.name),
        steps.Point("current", NEW.name),
        steps.EndForkServers((OLD.name,)),
    ]


def test_what_is_in_effect_already_needs_nothing() -> None:
    assert plan_installation(WITH_OLD, InstallRequest(tree=OLD, source="/src")) == []


def test_leftovers_go_first_and_links_that_lead_elsewhere_are_set_right() -> None:
    survey = replace(WITH_OLD, leftovers=("/opt/x/.incoming-1",), links=_links(right=False))
    plan = plan_installation(survey, InstallRequest(tree=OLD, source="/src"))
    assert plan[0] == steps.Clear("/opt/x/.incoming-1")
    assert [type(step) for step in plan[1:]] == [steps.Link, steps.Link]


def test_an_intact_tree_is_used_again_and_a_damaged_one_left_as_it_is() -> None:
    there = replace(WITH_OLD, installed=(_installed(OLD), _installed(NEW)))
    assert plan_installation(there, InstallRequest(tree=NEW, source="/src"))[0] == steps.Test(
        NEW.name, new=False
    )
    damaged = replace(WITH_OLD, installed=(_installed(OLD, problem="a is changed"),))
    assert plan_installation(damaged, InstallRequest(tree=OLD, source="/src"))[0] == steps.Put(
        "/src", f"{OLD.name}.2"
    )


def test_another_tree_with_the_same_name_is_placed_beside_it() -> None:
    twin = replace(OLD, digest="a" * 8 + "f" * 56)
    assert twin.name == OLD.name
    assert steps.Put("/src", f"{OLD.name}.2") in plan_installation(
        WITH_OLD, InstallRequest(tree=twin, source="/src")
    )


def test_of_trees_that_nothing_uses_the_previous_one_stays_and_older_ones_go() -> None:
    installed = (_installed(OLDER, placed=1), _installed(OLD, placed=2), _installed(NEW, placed=3))
    survey = Survey(PLACE, installed, NEW.name, OLD.name, _links())
    assert plan_collection(survey) == [steps.Collect(OLDER.name)]
    assert plan_collection(survey, keep=0) == [
        steps.Collect(OLD.name), steps.Collect(OLDER.name),
    ]  # fmt: skip
    assert plan_collection(survey, keep=2) == []


def test_a_tree_that_is_used_stays_and_its_fork_servers_end() -> None:
    shim, server = _user(Role.SHIM, OLDER), _user(Role.FORK_SERVER, OLDER)
    survey = Survey(
        PLACE, (_installed(OLDER, shim, server), _installed(NEW)), NEW.name, links=_links()
    )
    assert plan_collection(survey, keep=0) == [steps.EndForkServers((OLDER.name,))]
    only_server = replace(survey, installed=(_installed(OLDER, server), _installed(NEW)))
    assert plan_collection(only_server, keep=0) == [
        steps.EndForkServers((OLDER.name,)),
        steps.Collect(OLDER.name),
    ]


def test_nothing_is_collected_while_there_may_be_shims_that_are_not_seen() -> None:
    survey = Survey(
        PLACE, (_installed(OLDER), _installed(NEW)), NEW.name, links=_links(), may_miss_shims=True
    )
    assert plan_collection(survey, keep=0) == []
    assert steps.RemovePrefix(PLACE.prefix) not in plan_uninstallation(survey)
    assert needed_programs(survey) == {SHIM_LINK}


def test_the_fork_servers_of_what_was_in_effect_end_at_the_switch() -> None:
    survey = replace(WITH_OLD, installed=(_installed(OLD, _user(Role.FORK_SERVER, OLD)),))
    assert plan_installation(survey, InstallRequest(tree=NEW, source="/src"))[
        -1
    ] == steps.EndForkServers((OLD.name,))


def test_going_back_swaps_what_is_in_effect_and_what_was() -> None:
    survey = Survey(PLACE, (_installed(OLD), _installed(NEW)), NEW.name, OLD.name, _links())
    chosen = previous_version(survey)
    assert plan_installation(survey, InstallRequest(name=chosen.name)) == [
        steps.Test(OLD.name, new=False),
        steps.Point("previous", NEW.name),
        steps.Point("current", OLD.name),
        steps.EndForkServers((NEW.name,)),
    ]
    with raises(NothingToGoBackTo, match=r"--use"):
        previous_version(replace(survey, previous=""))


def test_a_version_is_named_in_any_way_that_is_not_ambiguous() -> None:
    twin = replace(OLD, digest="d" * 64)
    survey = Survey(PLACE, (_installed(OLD), _installed(twin), _installed(NEW)))
    assert installed_version(survey, "2.0").name == NEW.name
    assert installed_version(survey, twin.name).name == twin.name
    assert installed_version(survey, "1.0-d").name == twin.name
    for version, found in (("1.0", "2 match"), ("3", "only ")):
        with raises(VersionNotInstalled, match=found):
            installed_version(survey, version)


def test_without_containers_everything_goes_links_first() -> None:
    survey = Survey(PLACE, (_installed(OLD), _installed(NEW)), NEW.name, OLD.name, _links())
    plan = plan_uninstallation(survey)
    assert [type(step) for step in plan] == [
        *[steps.Unlink] * 4, steps.EndForkServers, *[steps.Collect] * 2, steps.RemovePrefix,
    ]  # fmt: skip


def test_under_containers_what_containerd_asks_for_stays() -> None:
    shim = _user(Role.SHIM, OLD, SHIM_LINK)
    survey = Survey(PLACE, (_installed(OLD, shim), _installed(NEW), _installed(OLDER)),
                    NEW.name, OLD.name, _links())  # fmt: skip
    assert plan_uninstallation(survey) == [
        steps.Unlink("/opt/x/previous"),
        steps.EndForkServers((OLD.name, NEW.name, OLDER.name)),
        steps.Collect(OLDER.name),
    ]
    elsewhere = replace(shim, asked_by="/opt/x/current/bin/containerd-shim-nvidia-v1")
    by_path = replace(survey, installed=(_installed(OLD, elsewhere), _installed(NEW)))
    assert plan_uninstallation(by_path)[0] == steps.Unlink(SHIM_LINK)


def test_links_of_somebody_else_are_not_removed() -> None:
    foreign = Link(SHIM_LINK, "x", "/elsewhere", ours=False)
    survey = Survey(PLACE, (_installed(OLD),), OLD.name, links=(foreign,))
    assert steps.Unlink(SHIM_LINK) not in plan_uninstallation(survey)


def test_every_step_says_what_it_does_in_one_line() -> None:
    for step in (
        steps.Clear("/a"), steps.Put("/a", "b"), steps.Test("a", new=True), steps.Point("a", "b"),
        steps.Link("a", "b"), steps.Unlink("a"), steps.EndForkServers(("a",)), steps.Collect("a"),
        steps.RemovePrefix("a"),
    ):  # fmt: skip
        assert str(step).isprintable()
        assert "(" not in str(step)
