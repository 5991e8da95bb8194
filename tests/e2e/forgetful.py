"""A low-level runtime that forgets the terminal of a process."""

from __future__ import annotations

from typing import Final

# The runtime is not told of the console socket, and the process has no terminal.
FORGET_THE_TERMINAL: Final = """
for word do
  shift
  case $last in --console-socket) last= ; continue ;; esac
  last=$word
  [ "$word" = --console-socket ] || set -- "$@" "$word"
done
"""
