"""``python -m integration.cli``: ``nvshim`` from a checkout."""

from __future__ import annotations

import sys

from integration.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
