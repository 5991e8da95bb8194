"""Libraries that look like libcuda of a forward compatibility package, with its ELF note."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

_NOTE = """
    .section .note.cuda.fwd_compatibility, "{flags}", @note
    .balign {align}
    .long owner_end - owner
    .long text_end - text
    .long 1
owner:
    .asciz "{owner}"
owner_end:
    .balign {align}
text:
    .incbin "{text}"
text_end:
    .balign {align}
    .section .note.GNU-stack, "", @progbits
"""


def note(cuda: str = "13.1", *, branches: Any = None, brands: Any = None) -> bytes:
    """Return the content of a library's note, in NVIDIA's format."""
    said: dict[str, Any] = {"Format": 1, "CUDA Version": cuda}
    said |= {} if branches is None else {"Driver": branches}
    said |= {} if brands is None else {"Device": brands}
    return json.dumps(said).encode()


def build_libcuda(
    path: Path,
    says: bytes | None,
    *,
    soname: str = "libcuda.so.1",
    owner: str = "NVIDIA Corporation",
    loaded: bool = False,
    align: int = 4,
    bits: int = 64,
) -> Path:
    """Make a library.

    Args:
        says: the content of its note; None for a library without one.
        loaded: whether the note is in a segment, or only in a section.
        align: the alignment in bytes of the note's parts.

    Returns:
        ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_name(f".{path.name}.S")
    text = path.with_name(f".{path.name}.note")
    text.write_bytes(says or b"")
    flags = "a" if loaded else ""
    source.write_text(
        ""
        if says is None
        else _NOTE.format(flags=flags, align=align, owner=owner, text=os.fspath(text))
    )
    command = [
        "gcc", f"-m{bits}", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-o", str(path),
        str(source),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    finally:
        source.unlink()
        text.unlink()
    return path
