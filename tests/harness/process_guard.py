"""A pytest plugin: a test that changes its own process fails (:mod:`.own_process`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.own_process import guarded, look_again, outliving


@pytest.fixture(autouse=True)
def own_process_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that changes its own process.

    It is set up before every other function fixture: pytest first sets up those of sessions and
    modules, then the autouse ones, starting with those of this directory.
    """
    with guarded() as guard:
        yield
    if request.node.funcargs is None:
        return  # after Ctrl-C the session ends first, and what it has open
    # pytest drops the fixtures' values only after this, and what they hold open with them.
    request.node.funcargs.clear()
    if lines := guard.differences():
        pytest.fail("\n".join(["the test has changed its own process:", *lines]), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
    """Accept the changes of fixtures of sessions, modules and classes, which outlive the test."""
    if fixturedef.scope == "function":
        return (yield)
    look_again()
    with outliving(serves=fixturedef.scope != "session"):
        return (yield)


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Accept the changes of their teardown, too."""
    if fixturedef.scope != "function":
        look_again()


@pytest.hookimpl(wrapper=True)
def pytest_exception_interact() -> Iterator[None]:
    """Accept that pytest-timeout stops its timer when a test fails."""
    with outliving():
        return (yield)
