"""``python -m tests.anywhere``: the suite on machines that are unlike the one it was written on.

    make test-anywhere                            # all, but for those that passed at this commit
    make test-anywhere ONLY=boot,umask            # some
    make test-anywhere ONLY=uptime+tmpfs          # what holds at once, in one run
    make test-anywhere ONLY=boot ARGS=tests/unit  # a part of the suite in one

======================  ======================================================================
``circumstances.py``    the table: what is odd about each machine, and what runs there
``wrappers.py``         how a command gets there: namespaces, mounts, limits, virtual machines
``__main__.py``         runs the rows, keeps their output and their counts, prints the table
``installed.py``        a machine on which the product is installed and in use
``first.py``            the first process of a pid namespace
``root.py``             a Debian with nothing but what the README names
======================  ======================================================================

Rules
- Nothing of the machine changes: what is mounted, named or set goes with the namespace.
- A row runs ``make demo`` and all of ``make test``, unless the table says why a part is enough.
- NVSHIM_TEST_ORDER (the order of files) and WORKERS are passed on.
- A row in which no test passed has failed.
"""

from __future__ import annotations

import os
from typing import Final

from tools import REPOSITORY

__all__ = ["KEPT"]

KEPT: Final = os.path.join(REPOSITORY, ".cache", "anywhere")
"""Where the output of each run, and how it ended, is kept."""
