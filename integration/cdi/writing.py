"""Write a spec as text, in one step.

Rules
- A reader of the directory sees the old file or the new one, never a part
  (:func:`integration.files.replace_file`).
- A device, a FIFO, or an open descriptor (/dev/stdout) is written to, not replaced.
"""

from __future__ import annotations

import json
import os
from typing import Any

from integration.cdi.errors import CdiSpecUnwritten
from integration.files import replace_file


def format_of(path: str | None) -> str:
    """Return the format by a file's name: JSON for ``.json``, otherwise YAML."""
    return "json" if path is not None and path.endswith(".json") else "yaml"


def text_of(tree: Any, form: str) -> str:
    """Return a spec as text.

    Args:
        tree: the spec, as :func:`hooks.cdi.schema.to_tree` returns it.
        form: "yaml" or "json".

    Returns:
        The text, which ends with a newline.
    """
    if form == "json":
        return json.dumps(tree, indent=2) + "\n"
    import yaml  # noqa: PLC0415 - not needed for JSON

    # libyaml gives the same text faster: it saves a second for many MIG devices.
    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(
        tree, Dumper=dumper, sort_keys=False, default_flow_style=False, width=1000
    )
    return f"---\n{text}"


def write(path: str, text: str, *, durable: bool = True) -> None:
    """Write a file.

    Args:
        path: the path of the file; missing directories are created.
        text: its content.
        durable: as for :func:`~integration.files.replace_file`.

    Raises:
        CdiSpecUnwritten: it cannot be written. Nothing has changed.
    """
    try:
        if _is_not_replaced(path):
            with open(path, "wb", opener=_open_at_once) as stream:
                os.set_blocking(stream.fileno(), True)
                stream.write(text.encode())
        else:
            replace_file(path, text.encode(), durable=durable)
    except OSError as error:
        raise CdiSpecUnwritten(
            f"to write {path}",
            found=error.strerror or str(error),
            do="name another file, or check who may write there",
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting; a pipe that nobody reads is an error."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _is_not_replaced(path: str) -> bool:
    """Return whether a path is a device, a pipe, or an open descriptor."""
    place = os.readlink(path) if os.path.islink(path) else path
    if os.path.realpath(os.path.dirname(place)).startswith("/proc/"):
        return True  # /dev/stdout, which may be a file
    return os.path.exists(path) and not os.path.isfile(path)
