"""What the doctor looks for, from the table of its checks."""

from __future__ import annotations

from typing import Final

from integration.doctor.checks import CHECKS
from tests.tools.reference.markdown import code, prose, table

__all__ = ["page"]

_HEAD: Final = """\
# What the doctor looks for

Run `nvshim doctor` to examine a node, or `nvshim doctor --only CODE` for one of these checks; they
change nothing. `nvshim explain CODE` says what comes of a finding.

An error hurts now: containers do not get their GPUs, or get what they must not. A warning will
hurt, after a reload of systemd, a boot or an update. A note is worth knowing. The exit status is 3
if there is an error.
"""


def page() -> str:
    """The page of all checks."""
    rows = [
        (
            f'<span id="{check.code.lower()}"></span>{code(check.code)}',
            check.severity.value,
            prose(check.title),
            prose(check.remedy) + (f": {code(check.command)}" if check.command else ""),
        )
        for check in sorted(CHECKS, key=lambda check: check.code)
    ]
    head = ("code", "severity", "what is wrong", "what to do")
    return f"{_HEAD}\n{table(head, rows)}"
