"""The exit statuses of ``nvshim``, which scripts may rely on.

======  ====================================================================================
status  meaning
======  ====================================================================================
0       done; of a command that judges: nothing is wrong
1       it failed, and one line on stderr says why, with a stable code
2       the command line is wrong; nothing was looked at or done
3       it looked, and found something wrong (``doctor``, ``status``, ``… validate``), or, of a
        dry run, that there would be something to change
130     interrupted (SIGINT)
141     whoever read the answer went away (SIGPIPE)
143     terminated (SIGTERM)
======  ====================================================================================

``nvshim verify``, which runs in a Job, ends with 1 if a check failed, and with 2 if nothing could
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
