"""The address of the cluster's API server, and the agent's credentials.

==================  ============================================================================
in a pod            the token and the authority's certificate that the kubelet mounts
a kubeconfig        from its current context: the server, its authority, and a token (``token``,
                    ``tokenFile``) or a client certificate, as in a kubelet's own
==================  ============================================================================

Rules
- Everything is read for each call: a kubelet replaces tokens and certificates before they expire.
- A kubeconfig that needs an unsupported feature is an error, and so is a server without
  authentication (``http:``, ``insecure-skip-tls-verify``): an impostor would decide which pod gets
  which GPU.
- Paths in a kubeconfig are relative to its directory.

Source: "Accessing the Kubernetes API from a Pod"; client-go tools/clientcmd/api/v1/types.go.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from api.values import dataclass, field
from hooks.cdi.tree import BadTree, Plain, of_yaml
from hooks.named_files import read_named
from integration.agent_errors import KubeconfigUnusable

__all__ = ["Access", "of_kubeconfig", "of_pod"]

_HTTPS: Final = 443
_OF_CLUSTER: Final = ("proxy-url", "insecure-skip-tls-verify")
_OF_USER: Final = ("exec", "auth-provider", "username", "password", "as", "as-uid", "as-groups")


@dataclass(frozen=True, slots=True)
class Access:
    """A server, and the credentials to use."""

    host: str  # its address; IPv6 without brackets
    port: int
    authority: str  # PEM certificates of the authority
    name: str = ""  # the name in its certificate; "" if that is the address
    # "" for none; a connection may be used with any token
    token: str = field(default="", compare=False)
    certificate: str = ""  # the client's PEM certificate and key; "" for none


def of_pod(host: str, port: int, directory: str) -> Access:
    """Return the access of a pod.

    Args:
        directory: the directory with the token and the authority's certificate.

    Raises:
        OSError: they cannot be read.
        ValueError: they are not text.
    """
    authority = _read(os.path.join(directory, "ca.crt"))
    token = _read(os.path.join(directory, "token")).strip()
    return Access(host.strip("[]"), port, authority, token=token)


def of_kubeconfig(path: str) -> Access:
    """Return the access that a kubeconfig gives.

    Raises:
        KubeconfigUnusable: the kubeconfig contains no credentials, or unsupported ones.
    """
    asked = f"to use the kubeconfig {path}"
    try:
        document = of_yaml(_read(path))
        context = _named(document, "context", document["current-context"])
        cluster = _named(document, "cluster", context["cluster"])
        user = _named(document, "user", context["user"])
        _refuse(asked, "cluster", cluster, _OF_CLUSTER)
        _refuse(asked, "user", user, _OF_USER)
        server = urlsplit(str(cluster["server"]))
        if server.scheme != "https" or not server.hostname or server.path.strip("/"):
            raise KubeconfigUnusable(
                asked, found=f"its server is {cluster['server']}", do="give https://HOST:PORT"
            )
        directory = os.path.dirname(path)
        key = _pem(user, "client-key", directory)
        certificate = _pem(user, "client-certificate", directory)
        token = str(user.get("token") or "")
        if user.get("tokenFile"):  # it comes before the token, as in client-go
            token = _read(os.path.join(directory, user["tokenFile"])).strip()
        return Access(
            server.hostname,
            server.port or _HTTPS,
            _pem(cluster, "certificate-authority", directory),
            str(cluster.get("tls-server-name") or ""),
            token,
            f"{key}\n{certificate}" if certificate else "",
        )
    except (KeyError, TypeError, ValueError, AttributeError, BadTree, OSError) as error:
        found = getattr(error, "strerror", None) or f"missing or wrong: {error}"
        raise KubeconfigUnusable(asked, found=found) from error


def _named(document: Any, kind: str, name: Any) -> Mapping[str, Any]:
    for each in document[f"{kind}s"]:
        if each["name"] == name:
            found: Mapping[str, Any] = each[kind]
            return found
    raise ValueError(f"there is no {kind} {name}")


def _refuse(asked: str, what: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    if found := [key for key in keys if _is_set(given.get(key))]:
        raise KubeconfigUnusable(asked, found=f"{', '.join(found)} of its {what} is not supported")


def _is_set(value: object) -> bool:
    is_false = isinstance(value, Plain) and value.lower() == "false"
    return bool(value) and not is_false


def _pem(given: Mapping[str, Any], key: str, directory: str) -> str:
    """Return a certificate or key, from the kubeconfig or its file; "" if there is none."""
    if data := given.get(f"{key}-data"):
        return base64.b64decode(data, validate=True).decode("ascii")
    return _read(os.path.join(directory, given[key])) if given.get(key) else ""


def _read(path: str) -> str:
    return read_named(path).decode()
