"""Generate the modules of :mod:`api.proto` from its ``.proto`` files, with protoc: ``make proto``.

Run as ``python3 -m tools.protos [--output DIR]`` in the root of a checkout.
"""

from __future__ import annotations

import argparse
import glob
import subprocess
import sys


def make(output: str) -> None:
    """Generate all modules.

    Args:
        output: a directory; files are written below it, by the paths of their sources.
    """
    sources = sorted(glob.glob("api/proto/*.proto"))
    argv = ["-I.", f"--python_out={output}", f"--pyi_out={output}", *sources]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *argv], check=True)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m tools.protos", description=__doc__)
    parser.add_argument("--output", default=".", help="the output directory (default: this one)")
    make(parser.parse_args().output)


if __name__ == "__main__":
    _main()
