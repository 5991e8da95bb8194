"""The options of a runtime handler as they come: what of them a verb needs, and their file.

``start`` needs ShimCgroup, and ``-info`` BinaryName; the server reads all of them in
:mod:`shim.options`. Keys of a TOML table are matched without regard to case, as containerd
does when it reads the table of its own runtime.

Source: containerd api/types/runc/options/oci.proto, api/types/runtimeoptions/v1/api.proto.
"""

from __future__ import annotations

import os
import stat

from shim import wire
from shim.errors import HandlerOptionsMalformed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

# Far more than any such table has.
LONGEST_FILE: Final = 1 << 20

_RUNC_OPTIONS: Final = "containerd.runc.v1.Options"
_CRI_OPTIONS: Final = "runtimeoptions.v1.Options"
_CONFIG_PATH, _CONFIG_BODY = 2, 3

_RUNC_FIELDS: Final = {"ShimCgroup": 3, "BinaryName": 6}


def text_option(options: Sequence[tuple[str, bytes]], key: str) -> str:
    """One option that is a text.

    Args:
        options: each an ``Any`` as (type URL, value); those of unknown types are left alone.
        key: ``ShimCgroup`` or ``BinaryName``.

    Returns:
        Its value; empty if it is not given, or would be in a file that cannot be read. Create
        reads that too, and says why.

    Raises:
        HandlerOptionsMalformed: the options cannot be understood.
    """
    try:
        for url, value in options:
            kind = url.rpartition("/")[2]
            if kind == _RUNC_OPTIONS:
                return wire.read_text_field(value, _RUNC_FIELDS[key])
            if kind == _CRI_OPTIONS:
                return _from_toml(value, key)
    except ValueError as error:
        raise HandlerOptionsMalformed(
            "the runtime's options", found=str(error), do="correct containerd's configuration"
        ) from error
    return ""


def read_file(path: str) -> bytes:
    """Read the file that a handler's options are in.

    Args:
        path: its absolute path; a link is followed.

    Raises:
        ValueError: it is missing, unreadable, no regular file or too large; the text says why.
    """
    if not os.path.isabs(path) or "\0" in path:
        message = "not an absolute path"
        raise ValueError(message)
    try:
        # Without O_NONBLOCK, opening a fifo would wait for whoever writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                message = "not a regular file"
                raise ValueError(message)
            content = b""
            while chunk := os.read(fd, LONGEST_FILE + 1):
                content += chunk
                if len(content) > LONGEST_FILE:
                    message = f"more than {LONGEST_FILE} bytes"
                    raise ValueError(message)
            return content
        finally:
            os.close(fd)
    except OSError as error:
        message = f"cannot be read: {os.strerror(error.errno or 0).lower()}"
        raise ValueError(message) from error


def _from_toml(options: bytes, key: str) -> str:
    path, body = "", b""
    for number, value in wire.fields(options):
        if number == _CONFIG_PATH and isinstance(value, bytes):
            path = value.decode()
        elif number == _CONFIG_BODY and isinstance(value, bytes):
            body = value
    if path and not body:
        try:
            body = read_file(path)
        except ValueError:
            return ""
    if key.lower().encode() not in body.lower():
        return ""
    import tomllib  # noqa: PLC0415 - 11 ms, and only for who sets this option

    found = [v for k, v in tomllib.loads(body.decode()).items() if k.lower() == key.lower()]
    return str(found[0]) if found else ""
