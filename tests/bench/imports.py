"""The cost of imports, from the output of ``-X importtime``.

Source: python(1), -X importtime.
"""

from __future__ import annotations

import re
from typing import Final

# import time:       132 |        132 |   zipimport
_IMPORT: Final = re.compile(r"import time: +(\d+) \| +\d+ \| +(\S+)")


def by_package(text: str) -> dict[str, tuple[int, float]]:
    """Return how many modules of each top-level package were imported, and their own time.

    Returns:
        Modules and milliseconds by the package's name, the most expensive first.
    """
    found: dict[str, tuple[int, float]] = {}
    for own, name in _IMPORT.findall(text):
        package = name.partition(".")[0]
        count, milliseconds = found.get(package, (0, 0.0))
        found[package] = count + 1, milliseconds + int(own) / 1000
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))
