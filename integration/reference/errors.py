"""What can go wrong while the documentation is made.

Leaves of the tree in :mod:`api.errors`, beside those in :mod:`integration.errors`::

    IntegrationError
    └── DocumentationError       E2690-E2699  the documentation
        ├── PictureMalformed     E2690
        └── BlockMissing         E2691
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class DocumentationError(IntegrationError):
    """Base of what can go wrong while the documentation is made."""


class PictureMalformed(DocumentationError):
    """A picture's text has a line that is not understood. Raised by the drawing of pictures."""

    code = "NVSHIM-E2690"
    status = Status.INVALID_ARGUMENT


class BlockMissing(DocumentationError):
    """A page has no place for the table that is generated into it. Raised by ``make reference``."""

    code = "NVSHIM-E2691"
    status = Status.FAILED_PRECONDITION
