"""A process's stdin, stdout and stderr: their sources and sinks, and who holds which end.

containerd names each of the three by a URI (:mod:`shim.stdio.uris`): a fifo that a client of
containerd reads or writes, a file to append to, a program that takes the output (a logger), or
nothing, which is /dev/null. :func:`open_stdio` opens them; :class:`~shim.stdio.streams.Stdio` has
the operations on them.

========  =======================  =======================================================
output    of                       what the process gets
========  =======================  =======================================================
fifo      init, stdout             the fifo itself: no byte passes through this process
fifo      init, stderr             a pipe, which is passed on (:mod:`shim.stdio.pipes`)
fifo      an exec                  the same
file      both                     a pipe, which a child writes to it (:mod:`shim.stdio.files`)
logger    both                     a pipe, which the logger reads (:mod:`shim.stdio.logger`)
any       one with a terminal      the terminal, whose master is passed on
========  =======================  =======================================================

Rules
- An exec may leave a daemon behind that holds its output open for ever, while its client waits for
  the end of the output. When the exec is deleted, the shim can only close its own descriptors. So
  the process gets a pipe.
- While the low-level runtime creates the process, it writes its errors to the process's stderr.
  They belong to the shim's error, not to the container's output. So nothing is passed on or written
  to a file before the process exists, and init's stderr is a pipe.
- A file is never passed to a process: through /proc/self/fd a hostile image could truncate it, or
  change its mode. The shim does not open one either, because a stuck file system must not block the
  pod.
- The shim keeps a *read* end of every pipe or fifo for output, so that a container is never killed
  by SIGPIPE while containerd, or a logger, is away. Output waits in the pipe until the pipe is
  full, and then the writer waits: nothing is dropped.
- The shim keeps a *write* end of stdin: input does not end when a client leaves, since another may
  attach. Only CloseIO closes it, and data in the fifo at that time still arrives.
- Opening a fifo must never block: a read end is opened first (non-blocking), so that the write end
  can be opened at once, and vice versa.
- An exit is published at once, despite unread output. Only a client that is reading gets a moment
  for the rest, because containerd before 1.6.22 drops what it has not read by then. Otherwise the
  shim keeps the rest, with an open end, for a later client.
- Delete waits until the output has been read, but not for ever.

Source: containerd docs/runtime-v2.md (I/O), core/runtime/v2/logging; fifo(7), pipe(7).
"""

from __future__ import annotations

from shim.stdio.streams import ChildStdio, Stdio
from shim.stdio.uris import StdioUris, open_stdio

__all__ = ["ChildStdio", "Stdio", "StdioUris", "open_stdio"]
