"""A low-level runtime that ignores the console socket of a process."""

from __future__ import annotations

from typing import Final

# The script removes --console-socket from the arguments, so the process gets no terminal.
FORGET_THE_TERMINAL: Final = """
for word do
  shift
  case $last in --console-socket) last= ; continue ;; esac
  last=$word
  [ "$word" = --console-socket ] || set -- "$@" "$word"
done
"""
