"""What makes, measures, documents and tries the product, and is no part of it.

Nothing below :mod:`api`, :mod:`hooks`, :mod:`shim` or :mod:`integration` imports from here, and no
installed tree has any of it. Each tool is run by a target of the Makefile.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["REPOSITORY"]

REPOSITORY: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The checkout."""
