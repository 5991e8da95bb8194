"""A spec as text, put in place in one step.

Rules
- Whoever reads the directory sees all of the old file or all of the new one
  (:func:`integration.files.replace_file`).
- What is there and is no file (a device, a FIFO), or open already (/dev/stdout), is written to,
  and stays.
"""

from __future__ import annotations

import json
import os
from typing import Any

from integration.cdi.errors import CdiSpecUnwritten
from integration.files import replace_file


def format_of(path: str | None) -> str:
    """The format that a file's name speaks of; YAML if it speaks of none."""
    return "json" if path is not None and path.endswith(".json") else "yaml"


def text_of(tree: Any, form: str) -> str:
    """A spec as text.

    Args:
        tree: the spec, as :func:`hooks.cdi.schema.to_tree` returns it.
        form: "yaml" or "json".

    Returns:
        The text, with its end of line.
    """
    if form == "json":
        return json.dumps(tree, indent=2) + "\n"
    import yaml  # noqa: PLC0415 - JSON does without

    # The same text by libyaml, where PyYAML has it: for many MIG devices a second is at stake.
    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(
        tree, Dumper=dumper, sort_keys=False, default_flow_style=False, width=1000
    )
    return f"---\n{text}"


def write(path: str, text: str, *, durable: bool = True) -> None:
    """Put a file in place.

    Args:
        path: where; missing directories are made.
        text: its content.
        durable: as :func:`~integration.files.replace_file` has it.

    Raises:
        CdiSpecUnwritten: it cannot be done. Nothing has changed.
    """
    try:
        if _is_no_file(path):
            with open(path, "wb") as stream:
                stream.write(text.encode())
        else:
            replace_file(path, text.encode(), durable=durable)
    except OSError as error:
        raise CdiSpecUnwritten(
            f"to write {path}",
            found=error.strerror or str(error),
            do="name another file, or see who may write there",
        ) from error


def _is_no_file(path: str) -> bool:
    """Whether something is there that is written to: a device, a pipe, or an open descriptor."""
    place = os.readlink(path) if os.path.islink(path) else path
    if os.path.realpath(os.path.dirname(place)).startswith("/proc/"):
        return True  # /dev/stdout, which may well be a file that somebody has opened
    return os.path.exists(path) and not os.path.isfile(path)
