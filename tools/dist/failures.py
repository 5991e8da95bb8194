"""How the programs that build things end: with one line for a person if they failed."""

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
    """Do some work, and say in one line why it failed."""
    try:
        work()
    except NvshimError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        what = TreeNotBuilt(
            f"to write {error.filename or directory}",
            found=_reason(error),
            do="look for room, and for who may write there",
        )
        print(f"{program}: {what}", file=sys.stderr)
        return 1
    return 0


def _reason(error: OSError) -> str:
    # Who copies many files tells of all that failed at once.
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][-1])
    return os.strerror(error.errno).lower() if error.errno else str(error)
