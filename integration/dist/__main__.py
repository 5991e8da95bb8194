"""``python -m integration.dist DIRECTORY``: ``make dist``."""

from __future__ import annotations

import argparse
import os
import sys

from api.errors import NvshimError
from integration.dist.build import build
from integration.dist.inputs import REPOSITORY, Inputs


def main() -> int:
    """Make the tree and what it is handed on as; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m integration.dist", description=__doc__)
    parser.add_argument("directory", help="where the tree and its archives are put")
    parser.add_argument("--tree-only", action="store_true", help="make no archives")
    parser.add_argument("--cache", default=os.path.join(REPOSITORY, ".cache", "dist"))
    asked = parser.parse_args()
    try:
        build(os.path.join(asked.directory, "tree"), Inputs.of(), cache=asked.cache)
    except NvshimError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
