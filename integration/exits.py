"""The exit statuses of ``nvshim``, which scripts may rely on.

======  ====================================================================================
status  meaning
======  ====================================================================================
0       done; a check found nothing wrong
1       the command failed; one line on stderr has the reason and a stable code
2       the command line is wrong; nothing was read or changed
3       a check found something wrong (``doctor``, ``status``, ``… validate``), or a dry run found
        something to change
130     interrupted (SIGINT)
141     the reader of the output exited (SIGPIPE)
143     terminated (SIGTERM)
======  ====================================================================================

``nvshim verify``, which runs in a Job, exits with 1 if a check failed, and with 2 if nothing could
be checked.
"""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
FOUND: Final = 3
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
TERMINATED: Final = 143
