"""The base of all errors of :mod:`integration`, and those of self-contained trees: E260x."""

from __future__ import annotations

from api.errors import NvshimError, Status


class IntegrationError(NvshimError):
    """Base of the errors of :mod:`integration`."""


def fields_of(error: NvshimError) -> dict[str, str]:
    """Return an error's fields, for a document or a log line."""
    return {
        "code": error.code,
        "name": error.slug,
        "asked": error.asked,
        "found": error.found,
        "do": error.do,
        "message": error.sentence,
    }


class TreeError(IntegrationError):
    """Base of the errors of reading or verifying a self-contained tree."""


# fmt: off
TreeUnreadable = TreeError.row("NVSHIM-E2601 tree-unreadable", Status.FAILED_PRECONDITION,
    "There is no ``tree.json``, or this program does not understand it.")
TreeDamaged = TreeError.row("NVSHIM-E2602 tree-damaged", Status.DATA_LOSS,
    "Files of a tree have changed since it was built; the error names the first of them.",
    remedy="install that version again")
