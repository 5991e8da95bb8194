"""``python -m hooks COMMAND``: the engine without a shim, for people who look into it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "explain": ("hooks.explain", "what a container would be given, and why"),
}
"""The module of each command, with a function ``main(arguments) -> status``, and what it does."""


def main(arguments: Sequence[str]) -> int:
    """Run a command.

    Args:
        arguments: its name, and what it is asked.

    Returns:
        Its exit status; 2 if there is no such command.
    """
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        lines = "".join(f"  {known:<10} {what}\n" for known, (_, what) in COMMANDS.items())
        out = sys.stdout if name in {"-h", "--help", "help"} else sys.stderr
        out.write(f"usage: python -m hooks COMMAND …\n\n{lines}")
        return 0 if out is sys.stdout else 2
    status: int = import_module(COMMANDS[name][0]).main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
