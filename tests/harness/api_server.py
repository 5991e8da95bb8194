"""A stand-in for a cluster's API server: it creates Events and patches Nodes for a token.

    with ApiServer(directory) as api:
        ...  # a client that uses api.port and api.service_account
        api.events

It speaks TLS with its own certificate for 127.0.0.1, ::1 and "api-server", which is valid until
2120; its key is not a secret.

Source: Kubernetes API, core/v1 Event and Node; strategic merge patch.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

from tests.harness.http_server import Request, served

__all__ = [
    "CERTIFICATE",
    "KEY",
    "ApiServer",
    "denied",
    "denied_by_webhook",
    "invalid",
    "refusal",
    "webhook_failed",
]

_CERTIFICATE: Final = (
    "MIIBfDCCASKgAwIBAgIBAjAKBggqhkjOPQQDAjAVMRMwEQYDVQQDDAphcGktc2VydmVyMCAXDTIwMDEwMTAwMDAwMFoY"
    "DzIxMjAwMTAxMDAwMDAwWjAVMRMwEQYDVQQDDAphcGktc2VydmVyMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEVY6O"
    "VUzmQ6yOXRiGX1luBTmh+55SD/wq/qBGtaUwPS3JoLxlLYEyIcqPglGfLtgjha8ksl4DT5WFJNAZvWEd46NhMF8wLQYD"
    "VR0RBCYwJIcEfwAAAYcQAAAAAAAAAAAAAAAAAAAAAYIKYXBpLXNlcnZlcjAPBgNVHRMBAf8EBTADAQH/MB0GA1UdDgQW"
    "BBSpgdI0/oLgVeGQPOt7cP0Q8CSFoTAKBggqhkjOPQQDAgNIADBFAiEAskqetV+nl+FIUTopQZU325VdFeD1aeATLkrg"
    "M7Sk+1ECIGRah2XpJVNKeDqjXpciiOUk0Q1dclvvtH3YuVszktay"
)
_KEY: Final = (
    "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgp5S13i2/mv1uSYYiHtkVp/2za4uX6OzmjGTBuuf+AXih"
    "RANCAARVjo5VTOZDrI5dGIZfWW4FOaH7nlIP/Cr+oEa1pTA9LcmgvGUtgTIhyo+CUZ8u2COFrySyXgNPlYUk0Bm9YR3j"
)
CERTIFICATE: Final = ssl.DER_cert_to_PEM_cert(base64.b64decode(_CERTIFICATE))
"""A self-signed certificate for 127.0.0.1 in PEM, which can be its own CA."""
_KIND: Final = "PRIVATE KEY"
KEY: Final = f"-----BEGIN {_KIND}-----\n{_KEY}\n-----END {_KIND}-----\n"


def refusal(
    code: int, message: str = "", *, retry_after: int = 0, causes: Sequence[dict[str, str]] = ()
) -> tuple[int, dict[str, Any]]:
    """Build a failure response.

    Args:
        retry_after: seconds, which the server also sends as a header; 0 sends none.
        causes: the problems, each with a ``field`` if it concerns a field of the object.
    """
    details = {
        **({"retryAfterSeconds": retry_after} if retry_after else {}),
        **({"causes": list(causes)} if causes else {}),
    }
    return code, {
        **({"details": details} if details else {}),
        "kind": "Status",
        "status": "Failure",
        "message": message or f"it is {code}",
        "code": code,
    }


def invalid(*wrong: tuple[str, str]) -> tuple[int, dict[str, Any]]:
    """Build the answer to an invalid object, as recorded (dra/api-answers.json).

    Args:
        wrong: the invalid fields, each with its problem.
    """
    told = ", ".join(f"{field}: {what}" for field, what in wrong)
    causes = [
        {"reason": "FieldValueInvalid", "message": what, "field": field} for field, what in wrong
    ]
    return refusal(422, f'ResourceSlice.resource.k8s.io "try" is invalid: {told}', causes=causes)


def denied(code: int = 422, policy: str = "no-slices") -> tuple[int, dict[str, Any]]:
    """Build a policy's denial, as recorded (dra-2/admission-policy-answers.txt)."""
    why = (
        f"ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: "
        "the agent writes ResourceSlices of its own node only"
    )
    message = f'resourceslices.resource.k8s.io "t1" is forbidden: {why}'
    return refusal(code, message, causes=[{"message": why}])


def denied_by_webhook(code: int = 400, name: str = "slices.example.com") -> tuple[int, Any]:
    """Build the denial of a webhook, which chooses the status."""
    return refusal(code, f'admission webhook "{name}" denied the request: not here')


def webhook_failed(name: str = "slices.example.com") -> tuple[int, Any]:
    """Build the answer to a request whose webhook timed out."""
    return refusal(
        500,
        f'Internal error occurred: failed calling webhook "{name}": failed to call webhook: Post '
        '"https://webhook.default.svc:443/?timeout=10s": context deadline exceeded',
    )


class ApiServer:
    """An API server. It runs on 127.0.0.1 while the context is open.

    Args:
        directory: where the client finds its token.
        host: the address on which it listens.
        by_certificate: whether clients authenticate with a certificate, the server's own, and not
            with a token.

    Attributes:
        service_account: ``directory``.
        connections: how many have been made to it.
        certificate: a file with the certificate and its key.
        events: the Events in their current state, each with the namespace of the request's path.
        nodes: the conditions of each Node, by its name.
        patches: the bodies of the PATCH requests, with their Content-Type.
        token: the token that may create Events.
        is_forbidden: whether every request is denied.
        port: the port on which it listens.
    """

    def __init__(
        self, directory: str, *, host: str = "127.0.0.1", by_certificate: bool = False
    ) -> None:
        self.host = host
        self.connections = 0
        self._newest: socket.socket | None = None
        self.certificate = f"{directory}.pem"
        self._by_certificate = by_certificate
        self.service_account = directory
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.nodes: dict[str, list[dict[str, Any]]] = {}
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.token = "first"
        self.is_forbidden = False
        self.port = 0
        self._running = ExitStack()

    def rotate(self, token: str) -> None:
        """Give the client another token; the old one is no longer accepted."""
        self.token = token
        new = os.path.join(self.service_account, "..new")
        with open(new, "w", encoding="ascii") as file:
            file.write(token)
        os.rename(new, os.path.join(self.service_account, "token"))

    def _answer(self, request: Request) -> tuple[int, Any]:
        token = request.headers.get("Authorization")
        if not self._by_certificate and token != f"Bearer {self.token}":
            return refusal(401)
        if self.is_forbidden:
            return refusal(403)
        return self.answer(request)

    def _connected(self, connection: socket.socket) -> None:
        self.connections += 1
        self._newest = connection

    def drop_connection(self) -> None:
        """Close the newest connection, as a server does after its idle timeout."""
        assert self._newest is not None
        self._newest.shutdown(socket.SHUT_RDWR)

    def answer(self, request: Request) -> tuple[int, Any]:
        """Handle an authorized request: create or patch an Event, or read or patch a Node."""
        _, _, node = request.path.partition("/api/v1/nodes/")
        if node:
            return self._of_node(request, node.removesuffix("/status"))
        body = json.loads(request.body)
        if request.method == "PATCH":
            self.patches.append((request.headers.get("Content-Type", ""), body))
            path, _, name = request.path.rpartition("/")
            for at, event in self.events:
                if (at, event["metadata"]["name"]) == (path, name):
                    event.update(body)
                    return 200, event
            return refusal(404, f'events "{name}" not found')
        body["metadata"]["name"] = f"{body['metadata']['generateName']}{len(self.events)}"
        self.events.append((request.path, body))
        return 201, body

    def _of_node(self, request: Request, name: str) -> tuple[int, Any]:
        if name not in self.nodes:
            return refusal(404, f'nodes "{name}" not found')
        if request.method == "PATCH":
            body = json.loads(request.body)
            self.patches.append((request.headers.get("Content-Type", ""), body))
            known = {each["type"]: each for each in self.nodes[name]}
            for each in body["status"]["conditions"]:
                known[each["type"]] = known.get(each["type"], {}) | each
            self.nodes[name] = list(known.values())
        return 200, {"metadata": {"name": name}, "status": {"conditions": self.nodes[name]}}

    def __enter__(self) -> Self:
        os.makedirs(self.service_account)
        own = os.path.join(self.service_account, "ca.crt")
        with open(own, "w", encoding="ascii") as file:
            file.write(CERTIFICATE)
        with open(self.certificate, "w", encoding="ascii") as file:
            file.write(KEY + CERTIFICATE)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate)
        if self._by_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(own)
        self.rotate(self.token)
        self.port = self._running.enter_context(
            served(self._answer, tls=context, host=self.host, connected=self._connected)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
