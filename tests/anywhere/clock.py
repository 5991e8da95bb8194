"""``python -m tests.anywhere.clock CHANGE COMMAND…``: change the wall clock, and run a command.

For virtual machines alone: there is no namespace of the wall clock, and a library that lies to
programs (LD_PRELOAD) reaches neither Go's nor static ones, and no file's time. So this changes the
clock itself::

    day-behind   the kernel has booted, and written files, a day after what is now
    leap         in half a minute a second is inserted, and the day after it is 29 February

Source: adjtimex(2); kernel/time/ntp.c: a second is inserted at the end of the day (UTC), whether
or not anything keeps the clock.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import struct
import subprocess
import sys
import time
from calendar import timegm
from typing import Final

_DAY: Final = 86_400
_BEFORE_LEAP: Final = timegm((2028, 2, 28, 23, 59, 30))
_INSERTED: Final = timegm((2028, 2, 29, 0, 0, 0))

# struct timex: modes, offset, freq, maxerror, esterror, status; more than the rest behind it.
_TIMEX: Final = struct.Struct("@Iqqqqi")
_ROOM: Final = 512
_ADJ_STATUS: Final = 0x10
_STA_INS: Final = 0x10
# What the call returns from the inserted second on, until the wish is taken back.
_IN_PROGRESS: Final = frozenset({3, 4})  # TIME_OOP, TIME_WAIT


def _adjust(modes: int = 0, status: int = 0) -> int:
    buffer = ctypes.create_string_buffer(_TIMEX.pack(modes, 0, 0, 0, 0, status), _ROOM)
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    if state < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return int(state)


def main() -> int:
    """Change the clock, run the command, and see that the change was there.

    Returns:
        The command's exit status; 1 if the clock was never as asked for.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.anywhere.clock", description=__doc__)
    parser.add_argument("change", choices=("day-behind", "leap"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if "NVSHIM_TEST_VM" not in os.environ:
        parser.error("this changes the machine's clock; run it in a virtual machine")
    if asked.change == "day-behind":
        time.clock_settime(time.CLOCK_REALTIME, time.time() - _DAY)
        return subprocess.run(asked.command, check=False).returncode
    time.clock_settime(time.CLOCK_REALTIME, _BEFORE_LEAP)
    _adjust(_ADJ_STATUS, _STA_INS)
    code = subprocess.run(asked.command, check=False).returncode
    if _adjust() not in _IN_PROGRESS or time.time() < _INSERTED:
        print("no second was inserted while the command ran", file=sys.stderr)  # noqa: T201
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
