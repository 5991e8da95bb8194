"""The base of all errors of :mod:`integration`.

Leaves of the tree in :mod:`api.errors`::

    NvshimError
    └── IntegrationError
        ├── …                       E20xx to E23xx  see integration.simulated.errors
        ├── …                       E242x  see integration.cri.errors
        ├── …                       E250x  see integration.cli.errors
        ├── InspectionError         E251x  see integration.containers.errors and those of inspection
        ├── …                       E253x  see integration.cdi.errors, integration.devices.errors
        ├── …                       E254x  see integration.compat.errors
        ├── …                       E255x, E256x, E257x  see integration.engines.errors
        ├── …                       E259x  see integration.doctor.errors
        ├── TreeError               E260x  self-contained trees
        │   ├── TreeUnreadable      E2601
        │   └── TreeDamaged         E2602
        ├── …                       E262x, E263x  see integration.install.errors
        ├── …                       E266x  see integration.kubernetes.errors
        ├── …                       E267x  see integration.verify.errors
        └── …                       E27xx  see integration.agent_errors
"""

from __future__ import annotations

from api.errors import NvshimError, Status


class IntegrationError(NvshimError):
    """Base of the errors of :mod:`integration`.

    A class may set its code and its status: ``class X(IntegrationError, code="…")``.
    """

    def __init_subclass__(cls, *, code: str = "", status: int | None = None) -> None:
        super().__init_subclass__()
        if code:
            cls.code = code
        if status is not None:
            cls.status = status


def fields_of(error: NvshimError) -> dict[str, str]:
    """Return an error's fields, for a document or a log line."""
    return {
        "code": error.code,
        "name": error.slug(),
        "asked": error.asked,
        "found": error.found,
        "do": error.do,
        "message": error.sentence,
    }


class TreeError(IntegrationError):
    """Base of the errors of reading or verifying a self-contained tree."""


class TreeUnreadable(TreeError, code="NVSHIM-E2601", status=Status.FAILED_PRECONDITION):
    """There is no ``tree.json``, or this program does not understand it."""


class TreeDamaged(TreeError, code="NVSHIM-E2602", status=Status.DATA_LOSS):
    """Files of a tree have changed since it was built; the error names the first of them."""

    remedy = "install that version again"
