"""Why an API server refuses a call: its Status, and which admission check refused.

Rules
- A 422 is the server's own validation only if it names fields (``details.causes``). A
  ValidatingAdmissionPolicy answers 422 by default, and may answer 401, 403 and 413; a webhook may
  answer anything. Only their messages identify both, so messages are checked before the status.
- The time to wait is in a header or in the Status.

Source: Kubernetes apimachinery api/errors (NewInvalid); apiserver, admission/plugin,
policy/validating and webhook/errors; answers of a real server.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from api.errors import printable
from integration.agent_errors import ApiServerRefused, ApiServerSilent

__all__ = ["Refusal", "is_away", "parse_status", "remedy_of", "retry_after"]

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
# The remedy if nothing is at a path, by the path's prefix.
_ABSENT: Final = (
    ("/api/v1/nodes/", "give --node-name as `kubectl get nodes` shows it"),
    ("/apis/", "check that the API server serves it (`kubectl api-versions`)"),
    ("", "check that it exists"),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call is refused."""

    message: str  # the server's message
    denied_by: str = ""  # the admission policy or webhook that refused; "" if none did
    invalid: tuple[str, ...] = ()  # the wrong fields of the object, with messages
    retry_after: float = 0.0  # seconds after which to ask again; 0 if unknown


def parse_status(code: int, said: bytes | str, header: str = "") -> Refusal:
    """Parse the body of a refusal. It may come from a proxy, so any content is accepted.

    Args:
        code: the HTTP status.
        header: Retry-After; "" for none.
    """
    try:
        status: Any = json.loads(said)
        message = printable(str(status["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Refusal("no reason given", retry_after=_seconds(header))
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
    """Return whether an error means that the server is unavailable or overloaded."""
    if isinstance(error, ApiServerRefused):
        is_its_own = error.http == _BUSY or error.http >= _FIRST_FAILURE
        return is_its_own and not error.denied_by
    return isinstance(error, ApiServerSilent)


def retry_after(error: BaseException) -> float:
    """Return the seconds after which the refusing server may be asked again; 0 if unknown.

    Args:
        error: the refusal, or an error that has it as its cause.
    """
    found = (getattr(each, "retry_after", 0.0) for each in (error, error.__cause__))
    return max(map(float, found))


def remedy_of(code: int, path: str, refusal: Refusal) -> str:
    """Return the remedy; "" if the error's own remedy (grant the agent the right) applies.

    Args:
        path: the path of the call.
    """
    if refusal.denied_by:
        return f"check the {refusal.denied_by}; the agent retries"
    if code == _UNAUTHENTICATED:
        return "check that the agent's token or certificate is the cluster's, and has not expired"
    if code == _NOT_FOUND:
        return next(what for prefix, what in _ABSENT if path.startswith(prefix))
    if code in _CONFLICTS:
        return "nothing: the agent reads it again and retries"
    if code == _INVALID and not refusal.invalid:
        return "find out what refuses it"
    if code in {_BAD_REQUEST, _INVALID}:
        return "report it, with the message"
    if code == _BUSY or code >= _FIRST_FAILURE:
        return "check the API server; the agent retries"
    return ""
