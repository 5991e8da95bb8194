"""Whether tests try the same examples in each run, or look for others at random.

``make test`` tries the same ones: what fails once fails again, and a change is judged by nothing
but itself. ``make check-more`` sets ``NVSHIM_TEST_EXAMPLES=random``, and each run tries others, of
hypothesis and of the tests that have a seed. What it finds becomes an explicit example.

``NVSHIM_TEST_SEED`` has such tests try one seed again, which a random run names where it fails.
"""

from __future__ import annotations

import os
import random
import secrets
from typing import Final

from hypothesis import HealthCheck, settings

__all__ = ["CHOICE", "FIXED", "RANDOM", "load_profile", "seeds"]

FIXED: Final = "fixed"
RANDOM: Final = "random"
CHOICE: Final = os.environ.get("NVSHIM_TEST_EXAMPLES", FIXED)
"""The name of hypothesis' profile: :data:`FIXED` or :data:`RANDOM`."""

_MANY: Final = 1000
_BITS: Final = 32
_SEED: Final = os.environ.get("NVSHIM_TEST_SEED", "")
_CHANCE: Final = secrets.randbits(_BITS)

# How long an example takes says something about the machine's other work, and not about ours.
settings.register_profile(
    FIXED,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    RANDOM,
    deadline=None,
    max_examples=_MANY,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def load_profile() -> None:
    """Have hypothesis do what was chosen, in all tests that are imported from now on."""
    settings.load_profile(CHOICE)


def seeds(count: int) -> list[int]:
    """The seeds that a test is to be tried with, as values of its parameter ``seed``.

    Args:
        count: how many, unless one was named.
    """
    if _SEED:
        return [int(_SEED)]
    if CHOICE == FIXED:
        return list(range(1, count + 1))
    dice = random.Random(_CHANCE)
    return [dice.getrandbits(_BITS) for _ in range(count)]
