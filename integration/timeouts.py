"""How much longer than on an idle machine of today things may take.

A machine that is emulated, or shared by many, is slow without being broken. Whoever waits for
a program of others multiplies its limit by :data:`PATIENCE`, which NVSHIM_PATIENCE sets.
"""

from __future__ import annotations

import os
from typing import Final

PATIENCE: Final = float(os.environ.get("NVSHIM_PATIENCE", "1"))
"""By what limits are multiplied."""
