"""What the doctor looks for, from the table of its checks."""

from __future__ import annotations

from typing import Final

from integration.doctor.checks import CHECKS
from tests.tools.reference.markdown import code, prose, table

__all__ = ["page"]

_HEAD: Final = """\
# What the doctor looks for

`nvshim doctor` makes these checks and changes nothing; `--only CODE` makes one. An error keeps
containers from their GPUs, or lets them have what they must not, now; a warning will hurt, after a
reload of systemd, a boot or an update; a note is worth knowing. The exit status is 3 if there is an
error. What could not be looked at (a right that is missing) is said, and is no finding.
"""


def page() -> str:
    """The page of all checks."""
    rows = [
        (
            f'<span id="{check.code.lower()}"></span>{code(check.code)}',
            check.severity.value,
            prose(check.title),
            prose(check.why),
            prose(check.remedy) + (f": {code(check.command)}" if check.command else ""),
        )
        for check in sorted(CHECKS, key=lambda check: check.code)
    ]
    head = ("code", "severity", "what", "what comes of it", "what to do")
    return f"{_HEAD}\n{table(head, rows)}"
