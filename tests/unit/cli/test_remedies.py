"""Every command that errors and the doctor's findings suggest is valid."""

from __future__ import annotations

import re
import shlex

from integration.doctor.checks import CHECKS
from tools.reference.commands import problem
from tools.reference.error_codes import every_error
from tools.reference.sources import remedies


def _named() -> set[str]:
    """Return every nvshim command that a remedy names."""
    texts = [text for several in remedies().values() for text in several]
    texts += [entry.remedy for entry in every_error()]
    texts += [check.remedy for check in CHECKS]
    found = {text for each in texts for text in re.findall(r"`(nvshim [^`…]+)`", each)}
    found |= {line for check in CHECKS for line in check.command.split(" && ")}
    return {line for line in found if line.startswith("nvshim ")}


def test_commands_of_remedies_are_ones_that_nvshim_takes() -> None:
    named = _named()
    assert {"nvshim list", "nvshim configure docker --replace"} <= named
    assert {line: said for line in named if (said := problem(shlex.split(line)))} == {}
