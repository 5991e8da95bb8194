"""``python -m integration.simulated``: ``nvshim simulate`` from a checkout."""

from __future__ import annotations

import sys

from integration.cli.app import main as nvshim


def main(arguments: list[str] | None = None) -> int:
    """Run one command of ``nvshim simulate``.

    Args:
        arguments: what the shell was given; ``sys.argv`` if None.

    Returns:
        The exit status.
    """
    return nvshim(["simulate", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
