"""Numbers for people: with as many digits as say something."""

from __future__ import annotations


def short(value: float) -> str:
    """Three digits, or all before the point."""
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{value:.0f}"
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def ratio(value: float) -> str:
    """Two digits behind the point; nothing is "0"."""
    return f"{value:.2f}" if value else "0"
