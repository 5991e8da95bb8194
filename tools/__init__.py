"""Programs that build, measure, document and try the product. They are not part of it.

Nothing in :mod:`api`, :mod:`hooks`, :mod:`shim` or :mod:`integration` imports from here, and no
installed tree contains it. A target of the Makefile runs each tool.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["REPOSITORY"]

REPOSITORY: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The checkout."""
