"""The address to serve metrics at: "ADDRESS:PORT".

Rules
- The syntax is that of Prometheus' own exporters: ":9477" is every address of the node, and
  "[::1]:9477" an IPv6 address. An address is numeric or a local name ("localhost").
- Port 0 chooses a free port, which the log names.
- A Unix socket is not supported, because Prometheus cannot scrape one.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

from integration.agent_errors import MetricsAddressInvalid, NodeAgentError

_FORM: Final = re.compile(
    r"(\[(?P<six>[^\[\]]*)\]|(?P<four>[0-9.]+)|(?P<name>[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)?)"
    r":(?P<port>[0-9]{1,5})"
)
_HIGHEST: Final = 65535


class Address(NamedTuple):
    """An address to listen at."""

    host: str  # an address or a name; "" for every address
    port: int  # 0 for a free port

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse an address.

    Args:
        text: "127.0.0.1:9477", "[::1]:9477", ":9477".

    Raises:
        MetricsAddressInvalid: the text is not an address.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise _invalid(text, "not ADDRESS:PORT")
    port, six, four = int(match["port"]), match["six"], match["four"]
    if port > _HIGHEST:
        raise _invalid(text, f"{port} is not a valid port")
    try:
        if six is not None:
            ipaddress.IPv6Address(six)
        if four is not None:
            ipaddress.IPv4Address(four)
    except ValueError as error:
        raise _invalid(text, str(error)) from None
    return Address(six or four or match["name"] or "", port)


def _invalid(text: str, found: str) -> NodeAgentError:
    return MetricsAddressInvalid(
        f"to serve metrics at {text!r}",
        found=found,
        do="write it as 127.0.0.1:9477, [::1]:9477, or :9477 for every address",
    )
