"""What can go wrong between a client of the CRI and the server: E242x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class CriError(IntegrationError):
    """Base of what a client of the CRI raises."""


class CriRefused(CriError, code="NVSHIM-E2421", status=Status.UNKNOWN):
    """The server answered a call with an error; ``status`` is the code that it gave.

    Attributes:
        said: the server's message, as it is.
    """

    def __init__(self, asked: str, *, said: str, status: int) -> None:
        super().__init__(asked, found=said)
        self.said = said
        self.status = status


class CriUnreachable(CriError, code="NVSHIM-E2422", status=Status.UNAVAILABLE):
    """There is no answer: nobody listens, the server went away, or it took too long."""

    remedy = "start the engine, or name its socket"
