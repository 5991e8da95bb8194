"""Skip tests of functions that an older pynvml lacks."""

from __future__ import annotations

import pynvml
import pytest


def needs(call: str) -> pytest.MarkDecorator:
    """Skip a test if pynvml lacks a function; the product works without it."""
    return pytest.mark.skipif(not hasattr(pynvml, call), reason=f"this pynvml lacks {call}")
