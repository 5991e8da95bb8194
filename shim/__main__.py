"""The program that containerd executes; in a checkout ``python3 -IS -m shim`` is the same."""

from __future__ import annotations

import sys
from typing import NoReturn

from shim.verbs.invocation import FORK_SERVER


def main(revision: str = "") -> NoReturn:
    """Execute the command line, and exit.

    Args:
        revision: the commit of the build.
    """
    words = sys.argv[1:]
    if words[-1:] == [FORK_SERVER]:
        # It checks the files before it imports them.
        from shim.forkserver.forkserver import main as be_fork_server  # noqa: PLC0415

        be_fork_server(words)
    # Leave imports to the fork server, which does them in its own way.
    from shim.verbs.verbs import main as do_verb  # noqa: PLC0415

    do_verb(words, revision=revision)


if __name__ == "__main__":
    main()
