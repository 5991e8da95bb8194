"""``-info``, ``-v`` and ``-h``: describe this runtime to containerd and to its users.

containerd from 1.7 on may query each runtime once for its features. The answer contains the
features that the low-level runtime, named in the options on stdin, reports. Without such a report
(runc 1.0, crun 1.8) they are left out, which containerd accepts. The options are returned
unchanged.

Source: containerd core/runtime/v2 PluginInfo, api/types/introspection.proto; the OCI runtime
spec, features.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from api.proto import types_pb2
from shim import files, programs
from shim.errors import (
    BundleUnusable,
    FeaturesUnknown,
    HandlerOptionsMalformed,
    InvalidRuntimeOptions,
    NvshimError,
)
from shim.runtime.options import DEFAULT_BINARY, can_read, read_options
from shim.verbs.invocation import read_stdin

# Seconds: a runtime answers in some milliseconds, while containerd waits.
_TIMEOUT: Final = 3.0
_LONGEST_FEATURES: Final = 1 << 20

# Go's typeurl encodes the features package as a JSON value.
FEATURES: Final = "types.containerd.io/opencontainers/runtime-spec/1/features/Features"

USAGE: Final = """\
containerd-shim-nvidia-v1 is called by containerd, for containers of the runtime
io.containerd.nvidia.v1:

  ctr run --runtime io.containerd.nvidia.v1 IMAGE NAME

  -info   print what the runtime can do (a containerd.types.RuntimeInfo)
  -v      print the version
  -namespace NAMESPACE -address ADDRESS -id ID [-debug] start
          start a shim for the bundle in the current directory, and print its address
  -namespace NAMESPACE -address ADDRESS -id ID [-bundle PATH] delete
          clean up after a shim that is gone
"""


def runtime_info(name: str, version: str, revision: str, *, tell: Callable[[str], None]) -> bytes:
    """Return the output of ``-info``.

    Args:
        name: containerd's name of the runtime.
        version: our version.
        revision: the commit that it was built from; "" if unknown.
        tell: called with a line about unreadable features.

    Returns:
        A RuntimeInfo.

    Raises:
        HandlerOptionsMalformed: stdin does not contain options.
        RequestTooLarge: stdin has more than any containerd writes.
    """
    try:
        options = AnyMessage.FromString(b"" if os.isatty(0) else read_stdin())
        binary = read_options(options).binary_name if can_read(options) else DEFAULT_BINARY
    except (DecodeError, InvalidRuntimeOptions) as error:
        found = error.found if isinstance(error, InvalidRuntimeOptions) else str(error)
        raise HandlerOptionsMalformed(
            "the options on stdin", found=found, do="correct containerd's configuration"
        ) from error
    info = types_pb2.RuntimeInfo(
        name=name, version=types_pb2.RuntimeVersion(version=version, revision=revision)
    )
    if options.type_url:
        info.options.CopyFrom(options)
    try:
        info.features.CopyFrom(AnyMessage(type_url=FEATURES, value=_features_of(binary)))
    except (NvshimError, OSError) as error:
        tell(f"{name}: no features of {binary}: {error}")
    return info.SerializeToString()


def _features_of(binary: str) -> bytes:
    """Return the features that a runtime reports, in JSON."""
    asked = f"{binary} features"
    program = programs.find(binary)
    if program is None:
        raise FeaturesUnknown(asked, found=f"no such program in {programs.search_path()}")
    ended = programs.run(program, [binary, "features"], timeout=_TIMEOUT, longest=_LONGEST_FEATURES)
    if ended.status != 0:
        said = " ".join(ended.stderr.decode(errors="replace").split()) or "no word why"
        how = "no end in time" if ended.status is None else f"exit status {ended.status}"
        raise FeaturesUnknown(asked, found=f"{how}: {said}")
    try:
        files.parse_object(ended.stdout, asked)
    except BundleUnusable as error:
        raise FeaturesUnknown(asked, found=error.found) from error
    return ended.stdout


def version_text(version: str, revision: str) -> str:
    """Return the output of ``-v``.

    Args:
        version: our version.
        revision: the commit that it was built from; "" if unknown.
    """
    python = ".".join(str(number) for number in sys.version_info[:3])
    return (
        "containerd-shim-nvidia-v1:\n"
        f"  Version:  {version}\n"
        f"  Revision: {revision or 'unknown'}\n"
        f"  Python:   {python} ({sys.executable})\n"
    )
