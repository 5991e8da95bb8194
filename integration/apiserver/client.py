"""The client of the cluster's API server.

Rules
- The address and the credentials are read for each call (:mod:`.credentials`).
- Calls block, so make them in a thread. One time limit covers a whole call; a watch has its own.
  Closing a watch ends it at once.
- If the server has closed a kept connection, or the connection is dead, a GET is repeated on
  another one, unless something of an answer has come. A slow server does not get it twice.
  Repeating a write could apply it twice, so each write uses a new connection.
- Refusals are told apart by HTTP status and message (:mod:`.status`), which the error carries.

Source: Kubernetes API concepts, "Efficient detection of changes" and "Resource versions";
"Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

from api.errors import one_line
from integration.agent_errors import ApiServerRefused, ApiServerSilent, KubeconfigUnusable
from integration.apiserver.connection import TIMEOUT, Connection, ConnectionUnusable, Kept
from integration.apiserver.credentials import Access, of_kubeconfig, of_pod
from integration.apiserver.status import Refusal, parse_status, remedy_of
from integration.json_documents import parse_json

__all__ = ["TIMEOUT", "ApiServer", "Watch"]

_WATCH_LASTS: Final = 300  # seconds until the server ends it, and it is resumed
_LONGEST: Final = 16 << 20
_LONGEST_REFUSAL: Final = 1 << 16
_FIRST_REFUSAL: Final = 300
_GONE: Final = 410
_PATCH: Final = "application/strategic-merge-patch+json"
_CUT: Final = (ConnectionError, ssl.SSLError, http.client.HTTPException)
_NO_CHANGE: Final = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The cluster's API server."""

    host: str  # its address
    port: int
    service_account: str  # the directory of the token and the authority's certificate
    kubeconfig: str = ""  # a path, used instead of all above; "" for none
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
            method: the HTTP method; a PATCH is a strategic merge patch.
            path: the resource's path ("/api/v1/nodes/one"), with quoted parts.
            body: a JSON value; None for none.

        Returns:
            The object in the answer.

        Raises:
            ApiServerSilent: there is no answer, or it cannot be parsed.
            ApiServerRefused: the server refuses.
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
            raise self.silent(asked, ValueError("the answer is not an object"))
        return found

    def watch(self, path: str, version: str, query: Mapping[str, str]) -> Watch:
        """Watch for changes.

        Args:
            path: the path of a resource type.
            version: the resourceVersion of a list, after which to start; "" to start with the
                present objects, as changes of the type ADDED.
            query: the selectors.

        Raises:
            ApiServerSilent: there is no answer.
            ApiServerRefused: the server refuses; 410 if it has forgotten the version.
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
        """Close the kept connections; later calls open their own."""
        self._kept.close()

    def _ask(
        self, method: str, path: str, body: Any, query: Mapping[str, str]
    ) -> tuple[Connection, http.client.HTTPResponse]:
        started = time.monotonic()
        access = self._access(f"to {method} {path}")
        target = f"{path}?{urlencode(query)}" if query else path
        headers = {
            **({"Authorization": f"Bearer {access.token}"} if access.token else {}),
            "Accept": "application/json",
            "Content-Type": _PATCH if method == "PATCH" else "application/json",
        }
        data = None if body is None else json.dumps(body)
        trust = self._kept.trust(access)
        ends = started + self.timeout
        while method == "GET" and (idle := self._kept.idle(access)) is not None:
            try:
                return idle, idle.asked(method, target, data, headers, ends)
            except ConnectionUnusable:
                continue
            except TimeoutError:
                self._kept.doubt()
                raise
        connection = Connection(access, trust)
        return connection, connection.asked(method, target, data, headers, ends)

    def _access(self, asked: str) -> Access:
        if not self.kubeconfig:
            return of_pod(self.host, self.port, self.service_account)
        try:
            return of_kubeconfig(self.kubeconfig)
        except KubeconfigUnusable as error:
            raise ApiServerSilent(asked, found=f"{error.asked}: {error.found}") from error

    def _refuse(self, asked: str, answer: http.client.HTTPResponse, body: bytes) -> None:
        """Raise ApiServerRefused if the answer is a refusal."""
        if answer.status < _FIRST_REFUSAL:
            return
        refusal = parse_status(answer.status, body, answer.headers.get("Retry-After", ""))
        raise _refused(asked, answer.status, answer.reason, refusal)

    def silent(self, asked: str, error: Exception) -> ApiServerSilent:
        """Return the error for a call without an answer."""
        host = self.host.strip("[]")
        where = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        where = f"the server of {self.kubeconfig}" if self.kubeconfig else where
        return ApiServerSilent(
            asked,
            found=one_line(str(error) or type(error).__name__),
            do=f"check that {where} can be reached from the agent's pod",
        )


class Watch:
    """A stream of changes. Made by :meth:`ApiServer.watch`.

    Args:
        asked: the request, for errors.
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
        """Yield type and object of each change, until the server ends the watch, or it is closed.

        A cut connection also counts as the end: load balancers cut idle connections, and servers
        that restart cut all. If there is no server, the next call reports that.

        Raises:
            ApiServerSilent: the server is silent for too long, or a line is not a change.
            ApiServerRefused: 410, the server has forgotten the version.
        """
        while (change := self.next()) is not None:
            yield change

    def next(self) -> tuple[str, dict[str, Any]] | None:
        """Return the next change; None at the end. Raises as the iteration does."""
        with self._reading:
            change = None
            try:
                change = self._read()
            finally:
                if change is None:
                    self._release()
        return change

    def close(self) -> None:
        """End the watch; a thread that waits for a change gets None."""
        with contextlib.suppress(OSError):  # it has ended already
            # Not TLS's shutdown: another thread reads from the TLS socket.
            socket.socket.shutdown(self._connection.below, socket.SHUT_RDWR)
        with self._reading:
            self._release()

    def _read(self) -> tuple[str, dict[str, Any]] | None:
        try:
            line = self._answer.readline(_LONGEST)
            if not line or (line[-1:] != b"\n" and len(line) < _LONGEST):
                return None
            change = parse_json(line)
            kind, found = change["type"], change["object"]
            if kind != "ERROR":
                return str(kind), dict(found)
            code = int(found.get("code") or _GONE)
        except _CUT:
            return None
        except (*_NO_CHANGE, OSError) as error:
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
