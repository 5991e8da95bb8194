"""Read the GPU shares that resource claims give a container from its environment.

``NVSHIM_GPU_SHARE_ID=UUID,memory=20480Mi,shares=1``: ID is the id of the share in Kubernetes, with
underscores instead of hyphens. The variable informs the container's own programs, and shows others
which share it has. A container that sets the variable itself gains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

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
    memory: int  # MiB; 0 if unknown
    shares: int  # how many shares of the GPU; 0 if unknown


def variable_of(share: Share) -> str:
    """Return the environment variable of a share."""
    name = share.id.replace("-", "_")
    return f"{_PREFIX}{name}={share.device},memory={share.memory}Mi,shares={share.shares}"


def shares_in(environment: Iterable[object]) -> tuple[Share, ...]:
    """Return the shares in an environment."""
    found = (_FORM.fullmatch(each) for each in environment if isinstance(each, str))
    return tuple(
        Share(match[1].replace("_", "-"), match[2], int(match[3]), int(match[4]))
        for match in found
        if match is not None
    )


def shares_of(container: Container) -> tuple[Share, ...]:
    """Return the shares of a container; empty if its bundle cannot be read."""
    process = container.spec_if(_PREFIX.encode()).get("process")
    environment = process.get("env") if isinstance(process, dict) else None
    return shares_in(environment if isinstance(environment, list) else ())
