"""Known advisories as a table, from the one that the security tests go by."""

from __future__ import annotations

import os
import runpy

from tests.tools import REPOSITORY
from tests.tools.reference.markdown import code, prose, table

__all__ = ["covered", "not_ours"]

_TABLE = os.path.join(REPOSITORY, "tests/security/advisories.py")


def covered() -> str:
    """What went wrong elsewhere, and the tests here."""
    data = runpy.run_path(_TABLE)
    rows = []
    for name, tests in data["COVERED"].items():
        files = dict.fromkeys(os.path.basename(test.partition("::")[0]) for test in tests)
        rows.append((name, prose(data["MECHANISM"][name]), ", ".join(map(code, files))))
    return table(("advisory", "what went wrong", "tests"), rows)


def not_ours() -> str:
    """What is not ours to mend, and why."""
    rows = [(name, prose(why)) for name, why in runpy.run_path(_TABLE)["NOT_OURS"].items()]
    return table(("advisory", "why"), rows)
