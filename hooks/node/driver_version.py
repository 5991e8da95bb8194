"""The driver's version: how it is written, and which one the loaded kernel module has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hooks.config import Config
    from hooks.node.witness import Witness

__all__ = ["is_version", "module_files", "module_version", "numbers"]

_FEWEST_PARTS: Final = 2
_MOST_PARTS: Final = 3


def is_version(text: str) -> bool:
    """Whether a word is a driver's version: two or three numbers, the first of three digits.

    The first has three digits since 2011; so "1.8.1" in a module's banner is none.
    """
    parts = text.split(".")
    return (
        _FEWEST_PARTS <= len(parts) <= _MOST_PARTS
        and all(part.isascii() and part.isdecimal() for part in parts)
        and len(parts[0]) >= _MOST_PARTS
    )


def numbers(version: str) -> tuple[int, ...]:
    """The parts of a version, by which versions compare."""
    return tuple(int(part) for part in version.split("."))


def module_files(config: Config) -> tuple[str, str]:
    """The files in which the loaded module says its version, the better one first."""
    return f"{config.proc}/driver/nvidia/version", f"{config.sys}/module/nvidia/version"


def module_version(witness: Witness, config: Config) -> str | None:
    """The version that the loaded kernel module has; None if none is loaded."""
    banner, alone = module_files(config)
    for word in (witness.text(banner) or "").partition("\n")[0].split():
        if is_version(word):
            return word
    text = (witness.text(alone) or "").strip()
    return text if is_version(text) else None
