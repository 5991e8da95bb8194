"""The cluster's API server, as the agent asks it.

Rules
- How it is reached, and as whom, is read for each call (:mod:`.api_access`).
- A call is made in a thread, for it blocks. All of it has one limit, and a watch has another; one
  that is closed ends at once.
- A GET on a connection that was kept and that the server has closed meanwhile, or that leads
  nowhere, is made once more on a new one. A write might be made twice so, and has a new one each
  time.
- What the server says no to is told apart by its HTTP status and its words (:mod:`.api_status`),
  which the error has.

Source: Kubernetes API concepts, "Efficient detection of changes" and "Resource versions";
"Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

from api.errors import one_line
from integration.agent_errors import ApiServerRefused, ApiServerSilent, KubeconfigUnusable
from integration.apiserver.connection import TIMEOUT, Connection, Kept
from integration.apiserver.credentials import Access, of_kubeconfig, of_pod
from integration.apiserver.status import Refusal, parse_status, remedy_of
from integration.json_documents import parse_json

__all__ = ["TIMEOUT", "ApiServer", "Watch"]

_WATCH_LASTS: Final = 300  # seconds until the server ends it, and it is resumed
_FOR_KEPT: Final = 1 / 4  # the part of a call's time that a connection that was kept has for it
_LONGEST: Final = 16 << 20
_LONGEST_REFUSAL: Final = 1 << 16
_FIRST_REFUSAL: Final = 300
_GONE: Final = 410
_PATCH: Final = "application/strategic-merge-patch+json"
_NO_CHANGE: Final = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The cluster's API server."""

    host: str  # its address
    port: int  # likewise
    service_account: str  # the directory that has the token, and the certificate of who signs
    kubeconfig: str = ""  # the path of one, in place of all of that; "" for none
    timeout: float = TIMEOUT  # seconds that a call may take
    _kept: Kept = field(default_factory=Kept, compare=False, repr=False)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Make a call.

        Args:
            method: of HTTP; the body of a PATCH is merged by the keys of Kubernetes' lists.
            path: of the resource ("/api/v1/nodes/one"), with its parts quoted.
            body: a JSON value; None for none.

        Returns:
            The object that the server answers with.

        Raises:
            ApiServerSilent: there is no answer, or none that can be read.
            ApiServerRefused: the server says no.
        """
        asked = f"to {method} {path}"
        try:
            connection, answer = self._ask(method, path, body, query or {})
            is_kept = False
            try:
                said = answer.read(_LONGEST + 1)
                is_kept = answer.isclosed() and not answer.will_close
            finally:
                if is_kept:
                    self._kept.keep(connection)
                else:
                    connection.close()
            self._refuse(asked, answer, said)
            found = parse_json(said if len(said) <= _LONGEST else b"")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self.silent(asked, error) from error
        if not isinstance(found, dict):
            raise self.silent(asked, ValueError("the answer is no object"))
        return found

    def watch(self, path: str, version: str, query: Mapping[str, str]) -> Watch:
        """Begin to hear of changes.

        Args:
            path: of a kind of resource.
            version: the resourceVersion after which changes are told.
            query: the selectors.

        Raises:
            ApiServerSilent: there is no answer.
            ApiServerRefused: the server says no; 410 if it does not know the version any more.
        """
        asked = f"to watch {path}"
        more = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_LASTS),
        }
        try:
            connection, answer = self._ask("GET", path, None, {**query, **more})
            if answer.status >= _FIRST_REFUSAL:
                with connection:
                    self._refuse(asked, answer, answer.read(_LONGEST_REFUSAL))
            connection.below.ends += _WATCH_LASTS
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self.silent(asked, error) from error
        return Watch(self, asked, connection, answer)

    def close(self) -> None:
        """Close the connections that were kept; a call after that has one of its own."""
        self._kept.close()

    def _ask(
        self, method: str, path: str, body: Any, query: Mapping[str, str]
    ) -> tuple[Connection, http.client.HTTPResponse]:
        begun = time.monotonic()
        access = self._access(f"to {method} {path}")
        target = f"{path}?{urlencode(query)}" if query else path
        headers = {
            **({"Authorization": f"Bearer {access.token}"} if access.token else {}),
            "Accept": "application/json",
            "Content-Type": _PATCH if method == "PATCH" else "application/json",
        }
        data = None if body is None else json.dumps(body)
        trust = self._kept.trust(access)
        ends = begun + self.timeout
        while method == "GET" and (idle := self._kept.idle(access)) is not None:
            soon = time.monotonic() + self.timeout * _FOR_KEPT
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = idle.asked(method, target, data, headers, min(soon, ends))
                idle.below.ends = ends
                return idle, answer
        connection = Connection(access, trust)
        return connection, connection.asked(method, target, data, headers, ends)

    def _access(self, asked: str) -> Access:
        if not self.kubeconfig:
            return of_pod(self.host, self.port, self.service_account)
        try:
            return of_kubeconfig(self.kubeconfig)
        except KubeconfigUnusable as error:
            raise ApiServerSilent(asked, found=f"{error.asked}: {error.found}") from error

    def _refuse(self, asked: str, answer: http.client.HTTPResponse, said: bytes) -> None:
        """Raise ApiServerRefused if the server has said no."""
        if answer.status < _FIRST_REFUSAL:
            return
        refusal = parse_status(answer.status, said, answer.headers.get("Retry-After", ""))
        raise _refused(asked, answer.status, answer.reason, refusal)

    def silent(self, asked: str, error: Exception) -> ApiServerSilent:
        """What has become of a call that was not answered."""
        host = self.host.strip("[]")
        where = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        where = f"the server of {self.kubeconfig}" if self.kubeconfig else where
        return ApiServerSilent(
            asked,
            found=one_line(str(error) or type(error).__name__),
            do=f"see that {where} can be reached from the agent's pod",
        )


class Watch:
    """Changes, as the server tells of them. Made by :meth:`ApiServer.watch`.

    Args:
        asked: what was asked for, for errors.
    """

    def __init__(
        self,
        server: ApiServer,
        asked: str,
        connection: Connection,
        answer: http.client.HTTPResponse,
    ) -> None:
        self._server = server
        self._asked = asked
        self._connection = connection
        self._answer = answer
        self._reading = threading.Lock()

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Type and object of each change, until the server ends the watch, or it is closed.

        Raises:
            ApiServerSilent: the connection broke, or what came is no change.
            ApiServerRefused: 410, the server does not know the version any more.
        """
        while (change := self.next()) is not None:
            yield change

    def next(self) -> tuple[str, dict[str, Any]] | None:
        """The next change; None once there are no more. Raises as the iteration does."""
        with self._reading:
            change = None
            try:
                change = self._read()
            finally:
                if change is None:
                    self._release()
        return change

    def close(self) -> None:
        """End it; whoever waits for a change in another thread hears that there are no more."""
        with contextlib.suppress(OSError):  # it has ended already
            # Not by TLS, which another thread is reading by.
            socket.socket.shutdown(self._connection.below, socket.SHUT_RDWR)
        with self._reading:
            self._release()

    def _read(self) -> tuple[str, dict[str, Any]] | None:
        try:
            line = self._answer.readline(_LONGEST)
            if not line:
                return None
            change = parse_json(line)
            kind, found = change["type"], change["object"]
            if kind != "ERROR":
                return str(kind), dict(found)
            code = int(found.get("code") or _GONE)
        except (*_NO_CHANGE, OSError, http.client.HTTPException) as error:
            raise self._server.silent(self._asked, error) from error
        raise _refused(self._asked, code, "", parse_status(code, json.dumps(found)))

    def _release(self) -> None:
        self._answer.close()
        self._connection.close()


def _refused(asked: str, code: int, reason: str, refusal: Refusal) -> ApiServerRefused:
    path = asked.rpartition(" ")[2]
    found = f"{f'{code} {reason}'.strip()}: {refusal.message}"
    error = ApiServerRefused(asked, found=found, do=remedy_of(code, path, refusal))
    error.http, error.retry_after = code, refusal.retry_after
    error.denied_by, error.invalid = refusal.denied_by, refusal.invalid
    return error
