"""``python -m tests.anywhere.stuck DIRECTORY -- COMMAND…``: run a command beside a stuck mount.

The directory is created, and a file system is mounted there that answers nothing: a path below it
hangs whoever asks for it, as with a network file system whose server is gone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading

from tests.harness.fuse import fuse


def main() -> int:
    """Mount the file system, run the command, and unmount it.

    Returns:
        The command's exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.anywhere.stuck", description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with fuse(options.directory, longest=threading.TIMEOUT_MAX) as server:
        server.hang()
        code = subprocess.run(options.command, check=False).returncode
        if server.asked.is_set():
            sys.stderr.write(f"somebody has asked for a path in {options.directory}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
