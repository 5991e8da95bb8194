"""``-info``, ``-v`` and ``-h``: what this runtime is, for containerd and for people.

containerd from 1.7 on may ask each runtime once what it can do. The answer holds the features
of the low-level runtime that the options on stdin name, as that runtime tells them itself; one
that cannot tell (runc 1.0, crun 1.8) leaves them out, which containerd takes well. The options
are returned as they came.

Source: containerd core/runtime/v2 PluginInfo, api/types/introspection.proto; the OCI runtime
spec, features.md.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

# Seconds: a runtime answers in some milliseconds, and containerd waits for us.
_TIMEOUT: Final = 3.0
_LONGEST_FEATURES: Final = 1 << 20

_DEFAULT_RUNTIME: Final = "runc"

# What Go's typeurl makes of the features package: a value in JSON.
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
    """What ``-info`` prints.

    Args:
        name: the runtime's name for containerd.
        version: ours.
        revision: the commit that it was built from; empty if that is not known.
        tell: is given a line about features that could not be had.

    Returns:
        A RuntimeInfo.

    Raises:
        HandlerOptionsMalformed: what is on stdin are no options.
        RequestTooLarge: there is more on stdin than any containerd writes.
    """
    from shim import wire  # noqa: PLC0415 - -v does without
    from shim.errors import HandlerOptionsMalformed, NvshimError  # noqa: PLC0415
    from shim.handleroptions import text_option  # noqa: PLC0415

    request = b"" if os.isatty(0) else wire.read_request(0)
    try:
        url, value = wire.read_any(request)
    except ValueError as error:
        raise HandlerOptionsMalformed(
            "the options on stdin", found=str(error), do="leave calling -info to containerd"
        ) from error
    binary = text_option([(url, value)], "BinaryName") or _DEFAULT_RUNTIME
    features = b""
    try:
        features = _features_of(binary)
    except (NvshimError, OSError) as error:
        tell(f"{name}: no features of {binary}: {error}")
    return wire.runtime_info(
        name,
        version,
        revision,
        options=wire.any_message(url, value) if url else b"",
        features=wire.any_message(FEATURES, features) if features else b"",
    )


def _features_of(binary: str) -> bytes:
    """What a runtime says that it can do, in JSON."""
    from shim import bundle, foreground, programs  # noqa: PLC0415 - -v does without
    from shim.errors import BundleUnusable, FeaturesUnknown  # noqa: PLC0415

    asked = f"{binary} features"
    program = programs.find(binary)
    if program is None:
        raise FeaturesUnknown(asked, found=f"no such program in {programs.search_path()}")
    ended = foreground.run(
        program, [binary, "features"], timeout=_TIMEOUT, longest=_LONGEST_FEATURES
    )
    if ended.status != 0:
        said = " ".join(ended.stderr.decode(errors="replace").split()) or "no word why"
        how = "no end in time" if ended.status is None else f"exit status {ended.status}"
        raise FeaturesUnknown(asked, found=f"{how}: {said}")
    try:
        bundle.parse_object(ended.stdout, asked)
    except BundleUnusable as error:
        raise FeaturesUnknown(asked, found=error.found) from error
    return ended.stdout


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
