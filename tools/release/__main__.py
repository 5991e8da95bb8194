"""``python -m tools.release DIRECTORY``: ``make release`` and ``make chart``."""

from __future__ import annotations

import argparse
import os
import sys

from tools import REPOSITORY
from tools.dist.failures import reported
from tools.dist.inputs import Inputs
from tools.release.build import build
from tools.release.chart import chart_name, write_chart
from tools.release.readiness import require_ready


def main() -> int:
    """Make a release, or only its chart; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("directory", help="the output directory")
    parser.add_argument("--key", default="", help="the file of the signing key")
    parser.add_argument("--chart-only", action="store_true", help="only build the Helm chart")
    parser.add_argument("--cache", default=os.path.join(REPOSITORY, ".cache", "dist"))
    asked = parser.parse_args()

    def make() -> None:
        inputs = Inputs.of()
        if asked.chart_only:
            os.makedirs(asked.directory, exist_ok=True)
            archive = os.path.join(asked.directory, chart_name(inputs.version))
            write_chart(archive, inputs.epoch)
            print(archive)
            return
        missing = require_ready(inputs, key=asked.key)
        build(asked.directory, inputs, cache=asked.cache, key=asked.key)
        for line in missing:
            print(f"a preview, not a release: {line}")

    return reported("release", asked.directory, make)


if __name__ == "__main__":
    sys.exit(main())
