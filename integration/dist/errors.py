"""What can go wrong with self-contained trees.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.errors.IntegrationError`::

    DistError                 E260x  the self-contained tree
    ├── TreeUnreadable        E2601
    ├── TreeDamaged           E2602
    ├── TreeNotBuilt          E2603
    └── LibraryMissing        E2604
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class DistError(IntegrationError):
    """Base of what can go wrong while a tree is built, read or verified."""


class TreeUnreadable(DistError):
    """There is no ``tree.json``, or it is not one that this program understands."""

    code = "NVSHIM-E2601"
    status = Status.FAILED_PRECONDITION


class TreeDamaged(DistError):
    """Files of a tree are not what they were when it was built; the first of them are named."""

    code = "NVSHIM-E2602"
    status = Status.DATA_LOSS


class TreeNotBuilt(DistError):
    """A step of building a tree or a package failed. What stood there before is as it was."""

    code = "NVSHIM-E2603"
    status = Status.FAILED_PRECONDITION


class LibraryMissing(DistError):
    """A program of the tree needs a library that none of the packages has."""

    code = "NVSHIM-E2604"
    status = Status.FAILED_PRECONDITION
