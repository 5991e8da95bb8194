"""What a code means: an error's (``NVSHIM-E0202``) or a finding's of the doctor (``NVSHIM-D096``).

The doctor's checks are a table. So are the errors, in ``codes.json``, which `make reference` makes
of their classes, and of what is said where each is raised; a test finds it if it is stale.
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
    """What a code means."""

    code: str  # in full
    name: str  # in some words
    meaning: str  # what it stands for
    causes: tuple[str, ...]  # what is found where it is said; ``…`` is what depends on the case
    remedies: tuple[str, ...]  # what to do; likewise
    command: str = ""  # what to type; "" if no command does it
    reference: str = ""  # where to read more; "" for nowhere

    def to_json(self) -> dict[str, Any]:
        """As an answer has it."""
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
    """The code that a text is, in full; None if it is none.

    Args:
        text: with or without ``NVSHIM-``, in capitals or not.
    """
    found = _CODE.fullmatch(text)
    return f"{_PREFIX}{found[1].upper()}" if found else None


def explain_code(code: str) -> Meaning:
    """What a code means.

    Raises:
        CodeUnknown: nothing has it.
    """
    found = _of_check(code) if code.startswith(f"{_PREFIX}D") else _of_error(code)
    if found is None:
        raise CodeUnknown(
            f"the code {code}",
            found="this version has no such code",
            do="see `nvshim doctor --list` for the doctor's, and docs/reference/errors.md",
        )
    return found


def _of_check(code: str) -> Meaning | None:
    from integration.doctor.checks import CHECKS  # noqa: PLC0415 - few codes are the doctor's

    for each in CHECKS:
        if each.code == code:
            return Meaning(
                code, each.title, each.why, (), (each.remedy,), each.command, each.reference
            )
    return None


def _of_error(code: str) -> Meaning | None:
    with open(_ERRORS, encoding="utf-8") as file:
        told = json.load(file).get(code)
    if told is None:
        return None
    return Meaning(
        code, told["name"], told["meaning"], tuple(told["causes"]), tuple(told["remedies"])
    )
