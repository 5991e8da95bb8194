"""An HTTP server in this process, for clients under test."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@contextmanager
def served(
    answer: Callable[[Request], tuple[int, Any]],
    *,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    connected: Callable[[socket.socket], None] | None = None,
) -> Iterator[int]:
    """Run a server; yield its port.

    Args:
        answer: called for each request of any method. It returns the status and the JSON document
            of the answer, or an iterator of documents that are streamed, one per line.
        tls: the TLS context; None for plain HTTP.
        host: the address on which it listens.
        connected: called with each connection. If it is set, connections are kept alive, as
            HTTP/1.1 does.
    """
    opened: list[socket.socket] = []

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True
        protocol_version = "HTTP/1.0" if connected is None else "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            opened.append(self.connection)
            if connected is not None:
                connected(self.connection)

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            request = Request(self.command, self.path, dict(self.headers), body)
            code, document = answer(request)
            if isinstance(document, Iterator):
                self._stream(code, document)
                return
            text = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            for header in _headers_of(document):
                self.send_header(*header)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _stream(self, code: int, documents: Iterator[Any]) -> None:
            self.protocol_version = "HTTP/1.1"
            self.close_connection = True
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with suppress(OSError):  # the client has disconnected
                for document in documents:
                    line = f"{json.dumps(document)}\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server's

        def log_message(self, *_: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        _end(opened)
        server.server_close()


def _end(connections: list[socket.socket]) -> None:
    for each in connections:
        with suppress(OSError):  # it has closed already
            each.shutdown(socket.SHUT_RDWR)


def _headers_of(document: Any) -> Iterator[tuple[str, str]]:
    """Return the headers that repeat a field of a Kubernetes failure."""
    details = document.get("details") if isinstance(document, dict) else None
    if details and "retryAfterSeconds" in details:
        yield "Retry-After", str(details["retryAfterSeconds"])
