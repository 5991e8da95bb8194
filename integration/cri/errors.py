"""Errors of the CRI client: E242x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class CriError(IntegrationError):
    """Base of the errors of the CRI client."""


class CriRefused(CriError, code="NVSHIM-E2421", status=Status.UNKNOWN):
    """The server answered a call with an error; ``status`` is the server's code.

    Attributes:
        said: the server's message, unchanged.
    """

    def __init__(self, asked: str, *, said: str, status: int) -> None:
        super().__init__(asked, found=said)
        self.said = said
        self.status = status


# fmt: off
CriUnreachable = CriError.row("NVSHIM-E2422 cri-unreachable", Status.UNAVAILABLE,
    "There is no answer: no server listens, the server ended, or it took too long.",
    remedy="start the engine, or name its socket")
