"""A process's stdin, stdout and stderr: where they come from and who holds which end.

containerd names each of the three by a URI (:mod:`shim.stdio.uris`): a fifo that a client of
containerd reads or writes, a file to append to, a program that takes the output (a logger), or
nothing, which is /dev/null. :func:`open_stdio` opens them; :class:`~shim.stdio.streams.Stdio` says
what can be asked of them then.

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
- An exec may leave a daemon behind that holds its output open for ever; only what we hold can
  be closed when it is deleted, and its client waits for that end. Hence the pipe.
- The low-level runtime has the process's stderr while it makes it, and writes there why it failed.
  That is in the error, and not the container's output. So nothing is passed on or written to a file
  before the process has been made. Hence the pipe of init's stderr.
- A file is never handed over: through /proc/self/fd a hostile image would truncate it, or
  change its mode. Nor does the shim open one: a stuck file system must not hold up the pod.
- The shim keeps a *read* end of every pipe or fifo that takes output, so that a container is never
  killed by SIGPIPE while containerd, or a logger, is away. What is written meanwhile waits in the
  pipe, and then the writer waits: nothing is dropped.
- The shim keeps a *write* end of stdin: a client that goes away is not the end of input, and
  another may attach. Only CloseIO drops it, and what is in the fifo then still arrives.
- No open of a fifo may block: a read end is opened first (non-blocking), which lets the write
  end be opened at once, and the other way round.
- An exit is published at once, whatever is unread. Only a client that is reading has a moment for
  the rest: containerd before 1.6.22 forgets what it has not read by then. Otherwise the shim holds
  it, with an open end, for a client that comes later.
- Delete waits until what was written has been taken, but not for ever.

Source: containerd docs/runtime-v2.md (I/O), core/runtime/v2/logging; fifo(7), pipe(7).
"""

from __future__ import annotations

from shim.stdio.streams import ChildStdio, Stdio
from shim.stdio.uris import StdioUris, open_stdio

__all__ = ["ChildStdio", "Stdio", "StdioUris", "open_stdio"]
