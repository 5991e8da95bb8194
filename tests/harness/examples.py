"""How many examples tests try, and whether they are the same ones in each run.

``make test`` tries a few, and always the same: what fails once fails again, and a change is judged
by nothing but itself. ``NVSHIM_TEST_EXAMPLES=thorough`` tries many, also always the same;
``random`` (``make test-examples``) tries others in each run, of hypothesis and of the tests that
have a seed. What that finds becomes an explicit example.

``NVSHIM_TEST_SEED`` has such tests try one seed again, which a random run names where it fails.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Sequence
from typing import Final, TypeVar

from hypothesis import HealthCheck, settings

__all__ = ["CHOICE", "FIXED", "RANDOM", "THOROUGH", "load_profile", "seeds", "some"]

FIXED: Final = "fixed"
THOROUGH: Final = "thorough"
RANDOM: Final = "random"
CHOICE: Final = os.environ.get("NVSHIM_TEST_EXAMPLES", FIXED)
"""The name of hypothesis' profile: :data:`FIXED`, :data:`THOROUGH` or :data:`RANDOM`."""

_FEW: Final = 40
_MANY: Final = 1000
_EACH: Final = 3  # of so many, one is tried by default
_BITS: Final = 32
_SEED: Final = os.environ.get("NVSHIM_TEST_SEED", "")
# Workers that run side by side have to have the same tests.
_RUN: Final = os.environ.get("PYTEST_XDIST_TESTRUNUID")
_CHANCE: Final = random.Random(_RUN).getrandbits(_BITS) if _RUN else secrets.randbits(_BITS)

# How long an example takes says something about the machine's other work, and not about ours.
for _name, _count in ((FIXED, _FEW), (THOROUGH, _MANY)):
    settings.register_profile(
        _name,
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=_count,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.register_profile(
    RANDOM,
    deadline=None,
    max_examples=_MANY,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)

T = TypeVar("T")


def load_profile() -> None:
    """Have hypothesis do what was chosen, in all tests that are imported from now on."""
    settings.load_profile(CHOICE)


def seeds(count: int) -> list[int]:
    """The seeds that a test is to be tried with, as values of its parameter ``seed``.

    Args:
        count: how many, unless one was named; many more when tests are thorough.
    """
    if _SEED:
        return [int(_SEED)]
    if CHOICE == FIXED:
        return list(range(1, count + 1))
    count *= _EACH
    if CHOICE == THOROUGH:
        return list(range(1, count + 1))
    dice = random.Random(_CHANCE)
    return [dice.getrandbits(_BITS) for _ in range(count)]


def some(cases: Sequence[T]) -> Sequence[T]:
    """A few of many cases that are alike, from the first on; all of them when tests are thorough.

    Args:
        cases: say, the moments at which something is killed.
    """
    return cases[::_EACH] if CHOICE == FIXED else cases
