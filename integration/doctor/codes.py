"""Explain a code: an error's (``NVSHIM-E0202``) or a doctor's finding (``NVSHIM-D096``).

The doctor's checks are a table. The errors are one too: `make reference` generates ``codes.json``
from the table of errors and the places that raise them. A test fails if the file is stale.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, Final

from integration.doctor.errors import CodeUnknown

_ERRORS: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "codes.json")
_CODE: Final = re.compile(r"(?:NVSHIM-)?(E\d{4}|D\d{3})", re.IGNORECASE | re.ASCII)
_PREFIX: Final = "NVSHIM-"


@dataclass(frozen=True, slots=True)
class Meaning:
    """The explanation of a code."""

    code: str  # in full
    name: str  # a short name or title
    meaning: str
    causes: tuple[str, ...]  # from the places that raise it; ``…`` stands for a variable part
    remedies: tuple[str, ...]  # what to do; ``…`` as above
    command: str = ""  # the command to type, if any
    reference: str = ""  # a page to read, if any

    def to_json(self) -> dict[str, Any]:
        """Return the explanation for a JSON document."""
        return {
            "code": self.code,
            "name": self.name,
            "meaning": self.meaning,
            "causes": list(self.causes),
            "remedies": list(self.remedies),
            "command": self.command or None,
            "reference": self.reference or None,
        }


def code_of(text: str) -> str | None:
    """Return the full code that a text names; None if it is not a code.

    Args:
        text: with or without ``NVSHIM-``, in upper or lower case.
    """
    found = _CODE.fullmatch(text)
    return f"{_PREFIX}{found[1].upper()}" if found else None


def explain_code(code: str) -> Meaning:
    """Return the explanation of a code.

    Raises:
        CodeUnknown: no error or check has this code.
    """
    found = _of_check(code) if code.startswith(f"{_PREFIX}D") else _of_error(code)
    if found is None:
        raise CodeUnknown(
            f"the code {code}",
            found="does not exist in this version",
            do="see `nvshim doctor --list` for the doctor's, and docs/reference/errors.md",
        )
    return found


def _of_check(code: str) -> Meaning | None:
    from integration.doctor.checks import CHECKS  # noqa: PLC0415 - slow, and most codes are errors

    for each in CHECKS:
        if each.code == code:
            return Meaning(
                code, each.title, each.why, (), (each.remedy,), each.command, each.reference
            )
    return None


def _of_error(code: str) -> Meaning | None:
    with open(_ERRORS, encoding="utf-8") as file:
        row = json.load(file).get(code)
    if row is None:
        return None
    return Meaning(code, row["name"], row["meaning"], tuple(row["causes"]), tuple(row["remedies"]))
