"""Where the cluster's API server is, and as whom the agent asks it.

==================  ============================================================================
in a pod            the token and the authority's certificate that the kubelet mounts
a kubeconfig        of its current context: the server, its authority, and a token (``token``,
                    ``tokenFile``) or a client certificate, as a kubelet's own has it
==================  ============================================================================

Rules
- All is read for each call: a kubelet replaces tokens and certificates long before they end.
- What a kubeconfig asks for and does not get here is an error, and so is a server that is not
  authenticated (``http:``, ``insecure-skip-tls-verify``): who answers in its place would decide
  which pod has which GPU.
- Paths in a kubeconfig are relative to its directory.

Source: "Accessing the Kubernetes API from a Pod"; client-go tools/clientcmd/api/v1/types.go.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from hooks.cdi.tree import BadTree, of_yaml
from integration.agent_errors import KubeconfigUnusable

__all__ = ["Access", "of_kubeconfig", "of_pod"]

_HTTPS: Final = 443
_OF_CLUSTER: Final = ("proxy-url", "insecure-skip-tls-verify")
_OF_USER: Final = ("exec", "auth-provider", "username", "password", "as", "as-uid", "as-groups")


@dataclass(frozen=True, slots=True)
class Access:
    """A server, and who asks it."""

    host: str  # its address; IPv6 without brackets
    port: int  # likewise
    authority: str  # PEM certificates of who signs its certificate
    name: str = ""  # in its certificate, if that is another than the address; "" if not
    # of who asks, "" for none; a connection is good for whichever
    token: str = field(default="", compare=False)
    certificate: str = ""  # PEM certificate and key of who asks; "" for none


def of_pod(host: str, port: int, directory: str) -> Access:
    """The access of a pod.

    Args:
        directory: which has the token, and the certificate of who signs.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not text.
    """
    authority = _read(os.path.join(directory, "ca.crt"))
    token = _read(os.path.join(directory, "token")).strip()
    return Access(host.strip("[]"), port, authority, token=token)


def of_kubeconfig(path: str) -> Access:
    """The access that a kubeconfig gives.

    Raises:
        KubeconfigUnusable: it gives none, or none that is to be used.
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
        found = getattr(error, "strerror", None) or f"it lacks or has wrong: {error}"
        raise KubeconfigUnusable(asked, found=found) from error


def _named(document: Any, kind: str, name: Any) -> Mapping[str, Any]:
    for each in document[f"{kind}s"]:
        if each["name"] == name:
            found: Mapping[str, Any] = each[kind]
            return found
    raise ValueError(f"there is no {kind} {name}")


def _refuse(asked: str, what: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    if found := [key for key in keys if given.get(key)]:
        raise KubeconfigUnusable(asked, found=f"{', '.join(found)} of its {what} is not obeyed")


def _pem(given: Mapping[str, Any], key: str, directory: str) -> str:
    """A certificate or key, which is in the file or beside it; "" if there is none."""
    if data := given.get(f"{key}-data"):
        return base64.b64decode(data, validate=True).decode("ascii")
    return _read(os.path.join(directory, given[key])) if given.get(key) else ""


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
