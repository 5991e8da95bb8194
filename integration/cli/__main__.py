"""Where ``nvshim`` begins: in a tree, and as ``python -m integration.cli`` in a checkout."""

from __future__ import annotations

import os
import sys
from typing import Final

_PROBE: Final = ["node", "--ready"]


def main() -> int:
    """Run the command line of this process; returns the exit status."""
    if sys.argv[1:] == _PROBE and (status := _readiness()) is not None:
        return status
    from integration.cli.app import main as run  # noqa: PLC0415 - a probe does without

    return run()


def _readiness() -> int | None:
    """What ``nvshim node --ready`` answers; None if that has to be said with more words.

    Kubelets ask three times a minute. To make all options of the command takes longer than this.
    """
    from api.errors import NvshimError  # noqa: PLC0415 - who does not ask does without
    from hooks.config import load_config  # noqa: PLC0415 - likewise
    from integration import exits  # noqa: PLC0415 - likewise
    from integration.agent_status import is_ready  # noqa: PLC0415 - likewise

    pod = os.environ.get("POD_UID", "")
    if pod and not (pod.isascii() and pod.replace("-", "").isalnum()):
        return None
    try:
        return exits.OK if is_ready(load_config(), pod) else exits.FOUND
    except NvshimError:
        return None


if __name__ == "__main__":
    sys.exit(main())
