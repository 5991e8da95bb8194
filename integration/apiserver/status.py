"""What an API server says of a call that it refuses: its Status, and who refuses.

Rules
- A 422 is the server's own judgement of an object only if it names fields (``details.causes``).
  A ValidatingAdmissionPolicy answers 422 as well, by default, and may answer 401, 403 and 413; a
  webhook answers what it likes. Both are known by their words alone, and go before the status.
- How long to wait is in a header or in the Status.

Source: Kubernetes apimachinery api/errors (NewInvalid); apiserver, admission/plugin, of which
policy/validating and webhook/errors; answers of a real server.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from api.errors import printable
from integration.agent_errors import ApiServerRefused, ApiServerSilent

__all__ = ["Refusal", "is_away", "parse_status", "remedy_of"]

_DENIALS: Final = (
    re.compile(r"\b((?:Validating|Mutating)AdmissionPolicy) '([^']{1,253})'"),
    re.compile(r"\b(admission webhook) \"([^\"]{1,253})\" (?:denied the request|does not support)"),
    re.compile(r"\bfailed (?:calling|to call) (webhook) \"([^\"]{1,253})\""),
)
_BAD_REQUEST, _INVALID = 400, 422
_UNAUTHENTICATED: Final = 401
_NOT_FOUND: Final = 404
_CONFLICTS: Final = frozenset({409, 410})
_BUSY: Final = 429
_FIRST_FAILURE: Final = 500
_MOST_CAUSES: Final = 16
# What helps where nothing is at a path, by how that begins.
_ABSENT: Final = (
    ("/api/v1/nodes/", "give --node-name as `kubectl get nodes` has it"),
    ("/apis/", "see that the API server serves it (`kubectl api-versions`)"),
    ("", "see that it exists"),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is refused."""

    message: str  # the server's words, for people
    denied_by: str = ""  # the admission policy or webhook that says no; "" if none does
    invalid: tuple[str, ...] = ()  # what is wrong with the object: each field, and the words
    retry_after: float = 0.0  # seconds after which to ask again; 0 if it does not say


def parse_status(code: int, said: bytes | str, header: str = "") -> Refusal:
    """Return what the body of a refusal says; it may be of a proxy, so nothing is expected of it.

    Args:
        code: the HTTP status.
        header: Retry-After; "" for none.
    """
    try:
        status: Any = json.loads(said)
        message = printable(str(status["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Refusal("no reason is given", retry_after=_seconds(header))
    details = status.get("details")
    details = details if isinstance(details, dict) else {}
    after = _seconds(header) or _seconds(details.get("retryAfterSeconds"))
    if denied := next(filter(None, (each.search(message) for each in _DENIALS)), None):
        return Refusal(message, f"{denied[1]} {denied[2]}", retry_after=after)
    causes = details.get("causes")
    causes = causes[:_MOST_CAUSES] if code == _INVALID and isinstance(causes, list) else []
    invalid = tuple(
        printable(f"{each['field']}: {each.get('message', '')}")
        for each in causes
        if isinstance(each, dict) and each.get("field")
    )
    return Refusal(message, invalid=invalid, retry_after=after)


def _seconds(told: object) -> float:
    text = str(told)
    return float(text) if text.isascii() and text.isdecimal() else 0.0


def is_away(error: BaseException | None) -> bool:
    """Return whether an error is of the server, and says nothing of what it was asked about."""
    if isinstance(error, ApiServerRefused):
        is_its_own = error.http == _BUSY or error.http >= _FIRST_FAILURE
        return is_its_own and not error.denied_by
    return isinstance(error, ApiServerSilent)


def remedy_of(code: int, path: str, refusal: Refusal) -> str:
    """Return what helps; "" if it is the error's own remedy: the agent lacks the right to do it.

    Args:
        path: that was asked for.
    """
    if refusal.denied_by:
        return f"see the {refusal.denied_by}; it is tried again"
    if code == _UNAUTHENTICATED:
        return "see whether the agent's token or certificate is the cluster's, and has not ended"
    if code == _NOT_FOUND:
        return next(what for begin, what in _ABSENT if path.startswith(begin))
    if code in _CONFLICTS:
        return "nothing: it is read and tried again"
    if code == _INVALID and not refusal.invalid:
        return "see what refuses it"
    if code in {_BAD_REQUEST, _INVALID}:
        return "report it, with the message"
    if code == _BUSY or code >= _FIRST_FAILURE:
        return "see how the API server is; it is asked again"
    return ""
