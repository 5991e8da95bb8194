"""Where metrics are served: "ADDRESS:PORT".

Rules
- As Prometheus' own exporters have it: ":9477" is every address of the node, "[::1]:9477" one of
  IPv6. An address is a number or a name of the node's own ("localhost").
- Port 0 is any that is free; which it is, the log says.
- There is no form for a socket in the file system: Prometheus cannot scrape one.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

from integration.agent_errors import MetricsAddressInvalid

_FORM: Final = re.compile(
    r"(\[(?P<six>[^\[\]]*)\]|(?P<four>[0-9.]+)|(?P<name>[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)?)"
    r":(?P<port>[0-9]{1,5})"
)
_HIGHEST: Final = 65535


class Address(NamedTuple):
    """Where to listen."""

    host: str  # an address or a name; "" for every address
    port: int  # 0 for any that is free

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read an address.

    Args:
        text: "127.0.0.1:9477", "[::1]:9477", ":9477".

    Raises:
        MetricsAddressInvalid: it is none.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise _invalid(text, "no ADDRESS:PORT")
    port, six, four = int(found["port"]), found["six"], found["four"]
    if port > _HIGHEST:
        raise _invalid(text, f"there is no port {port}")
    try:
        if six is not None:
            ipaddress.IPv6Address(six)
        if four is not None:
            ipaddress.IPv4Address(four)
    except ValueError as error:
        raise _invalid(text, str(error)) from None
    return Address(six or four or found["name"] or "", port)


def _invalid(text: str, found: str) -> MetricsAddressInvalid:
    return MetricsAddressInvalid(
        f"to serve metrics at {text!r}",
        found=found,
        do="write it as 127.0.0.1:9477, [::1]:9477, or :9477 for every address",
    )
