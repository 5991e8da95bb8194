"""What part of a GPU a container has, by the variables that its resource claim gives it.

``NVSHIM_GPU_SHARE_ID=UUID,memory=20480Mi,shares=1``: ID is the share's, as Kubernetes has it, with
underscores for hyphens. It is for the container's own programs, and tells others whose share it is;
a container that sets one itself has nothing by that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from shim import bundle as bundle_files
from shim import files
from shim.errors import BundleUnusable

if TYPE_CHECKING:
    from integration.containers.bundles import Container

__all__ = ["Share", "shares_in", "shares_of", "variable_of"]

_PREFIX: Final = "NVSHIM_GPU_SHARE_"
_FORM: Final = re.compile(
    rf"{_PREFIX}(\w{{1,64}})=([\w-]{{1,64}}),memory=(\d{{1,9}})Mi,shares=(\d{{1,4}})", re.ASCII
)


class Share(NamedTuple):
    """A part of a GPU."""

    id: str  # the share's
    device: str  # UUID of the GPU
    memory: int  # MiB; 0 if it is not known
    shares: int  # how many of the GPU's; 0 if it is not known


def variable_of(share: Share) -> str:
    """The variable that says of a container that it has a share."""
    name = share.id.replace("-", "_")
    return f"{_PREFIX}{name}={share.device},memory={share.memory}Mi,shares={share.shares}"


def shares_in(environment: Iterable[object]) -> tuple[Share, ...]:
    """The shares that variables tell of."""
    found = (_FORM.fullmatch(each) for each in environment if isinstance(each, str))
    return tuple(
        Share(match[1].replace("_", "-"), match[2], int(match[3]), int(match[4]))
        for match in found
        if match is not None
    )


def shares_of(container: Container) -> tuple[Share, ...]:
    """The shares of a container; none if its bundle cannot be read."""
    path = os.path.join(container.bundle, bundle_files.CONFIG)
    try:
        content = files.read(path, bundle_files.LONGEST_SPEC)
        if _PREFIX.encode() not in content:
            return ()
        process = files.parse_object(content, path).get("process")
    except BundleUnusable:
        return ()
    environment = process.get("env") if isinstance(process, dict) else None
    return shares_in(environment if isinstance(environment, list) else ())
