"""Record what a file was made from, next to it: when that changes, the file is rebuilt."""

from __future__ import annotations

import os


def write_stamp(path: str, text: str) -> None:
    """Record in the file ``path`` what its neighbour was made from."""
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(f"{path}.new", path)


def read_stamp(path: str) -> str:
    """Return the record; empty if there is none."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, ValueError):
        return ""
