"""``python -m tools.reference``: write the generated parts of docs/."""

from __future__ import annotations

import sys

from api.errors import NvshimError
from tools.reference.pages import write


def main() -> int:
    """Write the pages; print the changed ones."""
    try:
        for name in write():
            print(f"docs/{name}")
    except NvshimError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
