"""How much memory a process takes.

Source: proc(5), /proc/PID/smaps_rollup.
"""

from __future__ import annotations

from typing import Final

ROLLUP: Final = "smaps_rollup"
"""The file of a process that has the sums."""


def pss_and_uss(pid: int, proc: str = "/proc") -> tuple[int, int]:
    """The memory of a process: its part of what it shares, and what it has alone.

    Args:
        pid: the process.
        proc: where procfs is.

    Returns:
        PSS and USS in KiB.

    Raises:
        OSError: it is gone.
    """
    with open(f"{proc}/{pid}/{ROLLUP}", encoding="ascii") as file:
        return read_rollup(file.read())


def read_rollup(text: str) -> tuple[int, int]:
    """PSS and USS in KiB, of the text of a ``smaps_rollup``.

    Raises:
        KeyError: it is empty, as of a process that ends.
    """
    table = {}
    for line in text.splitlines()[1:]:
        name, value, _ = line.split()
        table[name] = int(value)
    return table["Pss:"], table["Private_Clean:"] + table["Private_Dirty:"]
