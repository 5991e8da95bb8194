"""Logger programs for containers' output, installed as an operator would install them.

Only root may write to any directory on their path. That is not true of pytest's directories.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote, urlencode

# The argument is a key and its value: `out DIRECTORY`. A background job would read /dev/null.
_BEGIN: Final = """#!/bin/sh
directory=$2
id=$CONTAINER_ID
echo $$ > "$directory/$id.pid"
env > "$directory/$id.env"
printf '%s\\n' "$0" "$@" > "$directory/$id.argv"
ls /proc/$$/fd > "$directory/$id.fds"
"""
_READ: Final = """
cat <&3 5>&- >> "$directory/$id.out" & out=$!
cat <&4 5>&- >> "$directory/$id.err" & err=$!
exec 3<&- 4<&-
"""
_WAIT: Final = """
wait $out
wait $err
echo ended >> "$directory/$id.end"
"""
READY: Final = "exec 5>&-\n"
READY_WITH_A_BYTE: Final = "printf r >&5; exec 5>&-\n"

# Reads to the end, then exits.
GOOD: Final = _BEGIN + _READ + READY + _WAIT
SPEAKING: Final = _BEGIN + _READ + READY_WITH_A_BYTE + _WAIT
# Waits for SIGTERM.
WAITING: Final = (
    _BEGIN
    + _READ
    + "trap 'echo told >> \"$directory/$id.end\"; exit' TERM\n"
    + READY
    + "wait $out; wait $err; while :; do sleep 0.05; done\n"
)
# Reads slowly.
SLOW: Final = (
    _BEGIN
    + READY
    + """
while dd bs=262144 count=1 iflag=fullblock <&3 2>/dev/null > "$directory/part"; do
  test -s "$directory/part" || break
  cat "$directory/part" >> "$directory/$id.out"
  sleep 0.05
done
echo ended >> "$directory/$id.end"
"""
)
DYING: Final = _BEGIN + "exit 3\n"
SILENT: Final = _BEGIN + "exec sleep 1000\n"
# Reports that it is ready, and dies after it has read a line.
SHORT_LIVED: Final = _BEGIN + READY + 'read line <&3; echo "$line" > "$directory/$id.out"\n'


class Loggers:
    """A directory of loggers.

    Args:
        directory: for the loggers and their output.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def make(self, script: str, name: str = "logger") -> str:
        """Install a logger; return its path."""
        path = os.path.join(self.directory, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(script)
        os.chmod(path, 0o755)
        return path

    def uri(self, script: str, scheme: str = "binary", name: str = "logger") -> str:
        """Install a logger; return a URI with which it writes to this directory."""
        path = quote(self.make(script, name))
        return f"{scheme}://{path}?{urlencode({'out': self.directory})}"

    def read(self, name: str) -> bytes:
        """Return what a logger has written to a file; empty if the file is missing."""
        try:
            with open(os.path.join(self.directory, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return b""

    def pid(self, process_id: str) -> int:
        """Return the pid of the logger of a process; 0 if there was none."""
        return int(self.read(f"{process_id}.pid") or 0)


@contextmanager
def loggers_directory() -> Iterator[Loggers]:
    """Make a directory for loggers, and remove it at the end."""
    path = tempfile.mkdtemp(prefix="nvshim-loggers-", dir="/run")
    os.chmod(path, 0o755)
    try:
        yield Loggers(path)
    finally:
        shutil.rmtree(path)
