"""Report the failure of a build program in one line."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from api.errors import NvshimError
from tools.errors import TreeNotBuilt

if TYPE_CHECKING:
    from collections.abc import Callable


def reported(program: str, directory: str, work: Callable[[], None]) -> int:
    """Do some work; if it fails, print the reason in one line."""
    try:
        work()
    except NvshimError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        what = TreeNotBuilt(
            f"to write {error.filename or directory}",
            found=_reason(error),
            do="check free space and write permission",
        )
        print(f"{program}: {what}", file=sys.stderr)
        return 1
    return 0


def _reason(error: OSError) -> str:
    # shutil reports all failed copies in one error.
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][-1])
    return os.strerror(error.errno).lower() if error.errno else str(error)
