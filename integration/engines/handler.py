"""The name of a runtime handler, which a RuntimeClass in Kubernetes has to be able to say.

Source: Kubernetes node.k8s.io/v1 RuntimeClass: a handler is a DNS label (RFC 1123).
"""

from __future__ import annotations

import re
from typing import Final

from integration.engines.errors import HandlerNameInvalid

__all__ = ["check_name"]

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def check_name(name: str) -> None:
    """See that a RuntimeClass can name a handler so.

    Args:
        name: of the handler.

    Raises:
        HandlerNameInvalid: it is no DNS label.
    """
    if _LABEL.fullmatch(name) is None:
        raise HandlerNameInvalid(
            f"the runtime name {name}",
            found="it is no DNS label",
            do="choose one of a-z, 0-9 and -, such as nvidia",
        )
