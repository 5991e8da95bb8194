"""``-v``: which version this is, in words.

Source: the layout that containerd's own shims print.
"""

from __future__ import annotations

import sys


def version_text(version: str, revision: str) -> str:
    """What ``-v`` prints.

    Args:
        version: ours.
        revision: the commit that it was built from; empty if that is not known.
    """
    python = ".".join(str(number) for number in sys.version_info[:3])
    return (
        "containerd-shim-nvidia-v1:\n"
        f"  Version:  {version}\n"
        f"  Revision: {revision or 'unknown'}\n"
        f"  Python:   {python} ({sys.executable})\n"
    )
