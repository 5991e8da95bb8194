"""A plugin of pytest: a test that changes its own process fails (:mod:`.own_process`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.own_process import guarded, look_again, outliving


@pytest.fixture(autouse=True)
def own_process_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that changes its own process.

    It is made before every other fixture of a test: those of modules and sessions come first, then
    those that nobody has to ask for, from this directory downwards.
    """
    with guarded() as guard:
        yield
    # pytest drops the fixtures' values only after this, and what they hold open with them.
    request.node.funcargs.clear()
    if lines := guard.differences():
        pytest.fail("\n".join(["the test has changed its own process:", *lines]), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
    """A fixture of a session, module or class that a test asks for as it runs outlives it."""
    if fixturedef.scope == "function":
        return (yield)
    look_again()
    with outliving(serves=fixturedef.scope != "session"):
        return (yield)


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    """So does its end."""
    if fixturedef.scope != "function":
        look_again()


@pytest.hookimpl(wrapper=True)
def pytest_exception_interact() -> Iterator[None]:
    """pytest-timeout stops its timer when a test fails."""
    with outliving():
        return (yield)
