"""``python -m tests.anywhere``: run the test suite on unusual machines.

    make test-anywhere                            # all that have not passed at this commit
    make test-anywhere ONLY=boot,umask            # some
    make test-anywhere ONLY=uptime+tmpfs          # several circumstances in one run
    make test-anywhere ONLY=boot ARGS=tests/unit  # a part of the suite in one

======================  ======================================================================
``circumstances.py``    the table: what is unusual about each machine, and which tests run
``wrappers.py``         the commands that set it up: namespaces, mounts, limits, VMs
``__main__.py``         runs the rows, saves their output and counts, prints the table
``installed.py``        a machine on which the product is installed and in use
``first.py``            the first process of a pid namespace
``root.py``             a Debian with only the packages that the README requires
======================  ======================================================================

Rules
- A run does not change the machine: its mounts, names and limits end with the namespace.
- A row runs ``make demo`` and all of ``make test``, unless the table says why a part is enough.
- The runs inherit NVSHIM_TEST_ORDER (the order of files) and WORKERS.
- A row fails if no test passed in it.
"""

from __future__ import annotations

import os
from typing import Final

from tools import REPOSITORY

__all__ = ["KEPT"]

KEPT: Final = os.path.join(REPOSITORY, ".cache", "anywhere")
"""The directory with the output and the result of each run."""
