"""How many examples tests try, and whether they are the same in each run.

``make test`` tries a few fixed ones: failures repeat, and a new failure is the fault of the change.
``NVSHIM_TEST_EXAMPLES=thorough`` tries many fixed ones. ``random`` (``make test-examples``) tries
new ones in each run, from hypothesis and in the tests that have a seed. A failure that it finds
becomes an explicit example.

``NVSHIM_TEST_SEED`` repeats one seed in such tests; a random run prints it when it fails.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Sequence
from typing import Final, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

__all__ = ["CHOICE", "FIXED", "RANDOM", "THOROUGH", "load_profile", "seeds", "some"]

FIXED: Final = "fixed"
THOROUGH: Final = "thorough"
RANDOM: Final = "random"
CHOICE: Final = os.environ.get("NVSHIM_TEST_EXAMPLES", FIXED)
"""The name of hypothesis' profile: :data:`FIXED`, :data:`THOROUGH` or :data:`RANDOM`."""

_FEW: Final = 40
_MANY: Final = 1000
_EACH: Final = 3  # by default, one of this many is tried
_BITS: Final = 32
_SEED: Final = os.environ.get("NVSHIM_TEST_SEED", "")
# Parallel workers need to have the same tests.
_RUN: Final = os.environ.get("PYTEST_XDIST_TESTRUNUID")
_CHANCE: Final = random.Random(_RUN).getrandbits(_BITS) if _RUN else secrets.randbits(_BITS)

# The time of an example depends on the machine's load more than on our code.
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
    """Set hypothesis to the chosen profile for all tests that are imported from now on."""
    settings.load_profile(CHOICE)
    if CHOICE == FIXED:
        # Constants of the product would be among the examples, so any change would change them.
        # Each worker would also take half a second to find the constants.
        providers._get_local_constants = lambda: providers._local_constants


def seeds(count: int) -> list[int]:
    """Return the seeds for a test's parameter ``seed``.

    Args:
        count: how many, unless the environment names one seed; thorough runs use many more.
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
    """Return a few of many similar cases, the first included; all of them in thorough runs.

    Args:
        cases: for example, the moments at which something is killed.
    """
    return cases[::_EACH] if CHOICE == FIXED else cases
