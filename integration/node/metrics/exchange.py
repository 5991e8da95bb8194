"""As much of HTTP/1.1 as a scrape needs: the head of a request, and an answer, as bytes.

Rules
- A request is GET or HEAD, has no body, and its head is at most :data:`LONGEST` bytes.
- What is not of the grammar is refused, and not guessed at: whatever stands between a scraper and
  the agent must not read it otherwise.
- Each connection has one request: it is over with the answer, and nobody keeps one for nothing.

Source: RFC 9110; RFC 9112.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LONGEST", "Refused", "Request", "Response", "accepts_gzip", "head_end", "parse_head"]

LONGEST: Final = 8192

_END: Final = b"\r\n\r\n"
_LINE: Final = re.compile(
    rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (/[\x21-\x7e]*) HTTP/1\.([01])", re.ASCII
)
# The blanks around a value are no part of the pattern: there is one way only to match it, or a head
# full of blanks would keep the agent for minutes.
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_BLANKS: Final = b" \t"
_METHODS: Final = frozenset({"GET", "HEAD"})


class Refused(Exception):
    """A request that is not answered.

    Args:
        status: why, as HTTP has it.
        reason: why, for people.
    """

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked.

    Attributes:
        method: "GET" or "HEAD".
        path: without what follows a question mark.
        headers: by their names in lower case; those that came twice are joined by commas.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered.

    Attributes:
        status: of HTTP.
        content: of what is sent.
        type: the content's media type.
        headers: further ones.
    """

    status: HTTPStatus
    content: bytes
    type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()

    def to_head(self) -> bytes:
        """What goes over the wire before the content, which one to HEAD goes without."""
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.type}",
            f"Content-Length: {len(self.content)}",
            "Connection: close",
            "X-Content-Type-Options: nosniff",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return ("".join(f"{line}\r\n" for line in lines) + "\r\n").encode("latin-1")


def head_end(received: bytes | bytearray) -> int:
    """Where a request's head ends, its last empty line included; -1 if it is not there yet.

    Raises:
        Refused: it is longer than allowed.
    """
    at = received.find(_END)
    if (at if at >= 0 else len(received)) > LONGEST:
        raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {LONGEST} bytes")
    return at + len(_END) if at >= 0 else -1


def parse_head(head: bytes) -> Request:
    """Understand a request.

    Args:
        head: of it, up to and with the empty line.

    Raises:
        Refused: it is none, or not one that is answered here.
    """
    first, *lines = head.removesuffix(_END).split(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise Refused(HTTPStatus.BAD_REQUEST, "no request of HTTP/1.1")
    headers: dict[str, str] = {}
    for each in lines:
        found = _FIELD.fullmatch(each)
        if found is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "a header that is none")
        name, value = found[1].decode().lower(), found[2].strip(_BLANKS).decode("latin-1")
        if name == "host" and name in headers:
            raise Refused(HTTPStatus.BAD_REQUEST, "two hosts")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if line[3] == b"1" and "host" not in headers:
        raise Refused(HTTPStatus.BAD_REQUEST, "no host")
    if "transfer-encoding" in headers or headers.get("content-length", "0").strip("0"):
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a body")
    method = line[1].decode()
    if method not in _METHODS:
        raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{method}, and not GET or HEAD")
    return Request(method, line[2].decode().partition("?")[0], headers)


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding allows gzip.

    Args:
        header: its value; "" if there is none.
    """
    for each in header.lower().split(","):
        coding, _, parameters = each.partition(";")
        if coding.strip() in {"gzip", "x-gzip"}:
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", parameters)
    return False
