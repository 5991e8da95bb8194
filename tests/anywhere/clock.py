"""``python -m tests.anywhere.clock CHANGE COMMAND…``: change the wall clock, and run a command.

Run it only in a virtual machine. The wall clock has no namespace, and a library in LD_PRELOAD
does not affect Go programs, static ones or file times. So this sets the clock itself::

    day-behind   a day before the boot and the newest files
    leap         30 seconds before a leap second and 29 February

Source: adjtimex(2); clock_gettime(2), CLOCK_TAI; kernel/time/ntp.c: a second is inserted at the end
of the day (UTC), whether or not anything keeps the clock.
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

# struct timex starts with modes, offset, freq, maxerror, esterror, status. _ROOM holds all of it.
_TIMEX: Final = struct.Struct("@Iqqqqi")
_ROOM: Final = 512
_ADJ_STATUS: Final = 0x10
_STA_INS: Final = 0x10


def _insert_a_second() -> None:
    status = _TIMEX.pack(_ADJ_STATUS, 0, 0, 0, 0, _STA_INS)
    buffer = ctypes.create_string_buffer(status, _ROOM)
    if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")


def _inserted() -> int:
    """Return the number of leap seconds: atomic time does not count them."""
    return round(time.clock_gettime(time.CLOCK_TAI) - time.time())


def main() -> int:
    """Change the clock, run the command, and check that the change happened.

    Returns:
        The command's exit status; 1 if no leap second was inserted.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.anywhere.clock", description=__doc__)
    parser.add_argument("change", choices=("day-behind", "leap"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if "NVSHIM_TEST_VM" not in os.environ:
        parser.error("this changes the machine's clock; run it in a virtual machine")
    if options.change == "day-behind":
        time.clock_settime(time.CLOCK_REALTIME, time.time() - _DAY)
        return subprocess.run(options.command, check=False).returncode
    time.clock_settime(time.CLOCK_REALTIME, _BEFORE_LEAP)
    before = _inserted()
    _insert_a_second()
    code = subprocess.run(options.command, check=False).returncode
    if _inserted() != before + 1:
        print("no second was inserted while the command ran", file=sys.stderr)  # noqa: T201
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
