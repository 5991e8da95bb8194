"""``python -m tests.bench.charts JSON… DIRECTORY``: what was measured, as pictures.

One file for each curve, named by its key, and ``targets.svg`` for what is to be reached. Of
several JSON files, a later one's word counts.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Final

from tests.bench.plots import Bar, bar_chart, curve_chart
from tests.bench.results import Results
from tests.bench.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Sequence

_TARGETS: Final = "targets"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, and draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.charts", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="JSON", help="written by python -m tests.bench")
    parser.add_argument("directory", metavar="DIRECTORY", help="made if missing")
    asked = parser.parse_args(arguments)
    results = Results.of_files(asked.files)
    write_charts(results, asked.directory)
    return 0


def write_charts(results: Results, directory: str) -> list[str]:
    """Draw what was measured.

    Args:
        results: what was measured; what was not is not drawn.
        directory: made if missing. A picture in it is replaced, others stay.

    Returns:
        The paths of the pictures.
    """
    os.makedirs(directory, exist_ok=True)
    paths = []
    for name, content in draw(results).items():
        path = os.path.join(directory, f"{name}.svg")
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
        paths.append(path)
    return paths


def draw(results: Results) -> dict[str, str]:
    """The pictures by their names."""
    pictures = {key: curve_chart(curve) for key, curve in results.curves.items()}
    bars = []
    for target in TARGETS:
        value = target.found(results)
        if target.label and value is not None:
            bars.append(Bar(target.label, value, target.must, target.aim))
    if bars:
        title = "containerd-shim-nvidia-v1 ÷ containerd-shim-runc-v2"
        pictures[_TARGETS] = bar_chart(title, bars, one="containerd's own shim without a GPU")
    return pictures


if __name__ == "__main__":
    sys.exit(main())
