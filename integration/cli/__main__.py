"""The entry point of ``nvshim``: in an installed tree, and as ``python -m integration.cli``."""

from __future__ import annotations

import os
import sys
from typing import Final

_PROBE: Final = ["node", "--ready"]


def main() -> int:
    """Run this process's command line and return the exit status."""
    if sys.argv[1:] == _PROBE and (status := _readiness()) is not None:
        return status
    from integration.cli.app import main as run  # noqa: PLC0415 - slow, and a probe does not need it

    return run()


def _readiness() -> int | None:
    """Answer ``nvshim node --ready``; return None if the full command must report an error.

    Kubelets probe three times a minute. Building all options of the command takes longer than this
    check.
    """
    from api.errors import NvshimError  # noqa: PLC0415 - only a probe needs it here
    from hooks.config import load_config  # noqa: PLC0415 - as above
    from integration import exits  # noqa: PLC0415 - as above
    from integration.agent_status import is_ready  # noqa: PLC0415 - as above

    pod = os.environ.get("POD_UID", "")
    if pod and not (pod.isascii() and pod.replace("-", "").isalnum()):
        return None
    try:
        return exits.OK if is_ready(load_config(), pod) else exits.FOUND
    except NvshimError:
        return None


if __name__ == "__main__":
    sys.exit(main())
