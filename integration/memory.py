"""How much memory a process takes.

Source: proc(5), /proc/PID/smaps_rollup.
"""

from __future__ import annotations


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
    table = {}
    with open(f"{proc}/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file.readlines()[1:]:
            name, value, _ = line.split()
            table[name] = int(value)
    return table["Pss:"], table["Private_Clean:"] + table["Private_Dirty:"]
