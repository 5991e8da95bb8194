"""The memory of a process, as ``smaps_rollup`` adds it up.

Source: proc(5), /proc/PID/smaps_rollup.
"""

from __future__ import annotations

from typing import Final

ROLLUP: Final = "smaps_rollup"
"""The file in the directory of a process."""


def pss_and_uss(pid: int, proc: str = "/proc") -> tuple[int, int]:
    """Return PSS and USS of a process in KiB.

    PSS divides each shared page among the processes that share it. USS counts private pages only.

    Args:
        proc: the mount point of procfs.

    Raises:
        OSError: the process has ended.
    """
    with open(f"{proc}/{pid}/{ROLLUP}", encoding="ascii") as file:
        return read_rollup(file.read())


def read_rollup(text: str) -> tuple[int, int]:
    """Return PSS and USS in KiB from the text of a ``smaps_rollup``.

    Raises:
        KeyError: the text is empty, because the process is exiting.
    """
    table = {}
    for line in text.splitlines()[1:]:
        name, value, _ = line.split()
        table[name] = int(value)
    return table["Pss:"], table["Private_Clean:"] + table["Private_Dirty:"]
