"""The generated files of docs/, and the handwritten ones."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tools import REPOSITORY, pod_trace
from tools.errors import BlockMissing
from tools.reference import (
    commands,
    configuration,
    dcgm,
    documents,
    error_codes,
    metrics,
    migration,
    tables,
)

__all__ = ["BLOCKS", "DOCS", "PAGES", "stale", "write"]

DOCS: Final = os.path.join(REPOSITORY, "docs")

_SCHEMA: Final = "reference/nvshim.schema.json"
_CODES: Final = "../integration/doctor/codes.json"
_MADE: Final = "<!-- Made by `make reference` of the code: change that. -->\n\n"

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "reference/nvshim.md": commands.page,
    "reference/configuration.md": configuration.page,
    "reference/errors.md": error_codes.page,
    "reference/findings.md": tables.findings,
    "reference/xids.md": tables.xids,
}
"""Pages that are generated completely."""

BLOCKS: Final[Mapping[str, Mapping[str, Callable[[], str]]]] = {
    "reference/variables.md": {
        "device-plugin": tables.plugin_variables,
        "installer": tables.installer_variables,
    },
    "kubernetes.md": {"pod-trace": pod_trace.diagram},
    "labels.md": {"labels": tables.node_labels},
    "metrics.md": {
        "families": metrics.families,
        "dcgm": dcgm.table_of_names,
    },
    "migration.md": {"keys": migration.keys, "defaults": migration.defaults},
    "support.md": {"runtimes": tables.tested, "runs": tables.tested_runs},
    "packages.md": {"packages": tables.packages},
    "requests.md": {"capabilities": tables.capabilities},
    "security.md": {"advisories": tables.advisories, "not-ours": tables.advisories_elsewhere},
}
"""Generated tables in handwritten pages, from ``<!-- made: NAME -->`` to ``<!-- made: end -->``."""

FILES: Final[Mapping[str, Callable[[], str]]] = {
    "components/prometheus-operator/prometheus-rule.yaml": metrics.prometheus_rule,
}
"""Files among the Kubernetes manifests that are generated completely."""


def _made() -> Iterator[tuple[str, str]]:
    """Yield every generated file, with its expected content."""
    for name, page in PAGES.items():
        yield name, _MADE + page()
    for name, blocks in BLOCKS.items():
        yield name, _with_blocks(name, blocks)
    for name, make in FILES.items():
        yield f"../integration/kubernetes/manifests/{name}", make()
    yield _SCHEMA, documents.text()
    yield _CODES, error_codes.table()


def _with_blocks(name: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    text = _read(name)
    for block, make in blocks.items():
        pattern = rf"(<!-- made: {block} -->\n).*?(<!-- made: end -->)"
        places = list(re.finditer(pattern, text, re.DOTALL))
        if len(places) != 1:
            raise BlockMissing(
                f"table {block} in docs/{name}",
                found=f"{len(places)} places for it",
                do=f"write <!-- made: {block} --> and <!-- made: end --> there, once",
            )
        place = places[0]
        made = f"{place[1]}\n{make()}\n{place[2]}"
        text = text[: place.start()] + made + text[place.end() :]
    return text


def _read(name: str) -> str:
    with open(os.path.join(DOCS, name), encoding="utf-8") as file:
        return file.read()


def stale() -> list[str]:
    """Return the files of docs/ that differ from the code."""
    found = []
    for name, text in _made():
        try:
            fresh = _read(name) == text
        except FileNotFoundError:
            fresh = False
        found += [] if fresh else [name]
    return found


def write() -> list[str]:
    """Write the stale files.

    Returns:
        The files that were written.
    """
    written = stale()
    for name, text in _made():
        if name in written:
            path = os.path.join(DOCS, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(f"{path}.new", path)
    return written
