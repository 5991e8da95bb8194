"""The Helm chart's archive: what is in integration/kubernetes/chart, and the alerts."""

from __future__ import annotations

import os
from typing import Final

from tools import REPOSITORY
from tools.dist.archive import PROJECT, write_tar

__all__ = ["chart_name", "files", "write_chart"]

_KUBERNETES: Final = os.path.join(REPOSITORY, "integration", "kubernetes")
_CHART: Final = os.path.join(_KUBERNETES, "chart")
_ALERTS: Final = os.path.join(_KUBERNETES, "manifests", "monitoring", "alerts.yaml")


def chart_name(version: str) -> str:
    """Return the name of the chart's archive."""
    return f"{PROJECT}-chart-{version}.tgz"


def files() -> dict[str, str]:
    """Return the text of each of the chart's files, by its path below the chart's directory."""
    paths = {
        os.path.relpath(os.path.join(above, name), _CHART): os.path.join(above, name)
        for above, _, names in os.walk(_CHART)
        for name in names
    }
    found = {}
    for name, path in {**paths, os.path.basename(_ALERTS): _ALERTS}.items():
        with open(path, encoding="utf-8") as file:
            found[name] = file.read()
    return found


def write_chart(path: str, epoch: int) -> None:
    """Write the chart's archive, atomically.

    Args:
        path: where to; an existing file is replaced.
        epoch: the time of each file, in seconds since 1970.
    """
    write_tar(path, {f"{PROJECT}/{name}": text.encode() for name, text in files().items()}, epoch)
