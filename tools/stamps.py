"""What something was made of, kept in a file beside it: a thing is made anew when that changes."""

from __future__ import annotations

import os


def write_stamp(path: str, text: str) -> None:
    """Remember what something beside it was made of."""
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(f"{path}.new", path)


def read_stamp(path: str) -> str:
    """What something was made of; empty if that is not known."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, ValueError):
        return ""
