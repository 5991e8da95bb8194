"""The factor for time limits on slow machines.

An emulated or shared machine is slow, not broken. Code that waits for another program multiplies
its limit by :data:`PATIENCE`, which NVSHIM_PATIENCE sets.
"""

from __future__ import annotations

import os
from typing import Final

PATIENCE: Final = float(os.environ.get("NVSHIM_PATIENCE", "1"))
"""The factor; 1 by default."""
