"""Which file of docs/ is made of what, and which others are."""

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
"""Pages that are made as a whole."""

BLOCKS: Final[Mapping[str, Mapping[str, Callable[[], str]]]] = {
    "reference/variables.md": {
        "device-plugin": tables.plugin_variables,
        "installer": tables.installer_variables,
    },
    "kubernetes.md": {"pod-trace": pod_trace.diagram},
    "metrics.md": {
        "families": metrics.families,
        "dcgm": dcgm.table_of_names,
    },
    "migration.md": {"keys": migration.keys, "defaults": migration.defaults},
    "support.md": {"runtimes": tables.tested, "runs": tables.tested_runs},
    "requests.md": {"capabilities": tables.capabilities},
    "security.md": {"advisories": tables.advisories, "not-ours": tables.advisories_elsewhere},
}
"""Tables in pages that people write, between ``<!-- made: NAME -->`` and ``<!-- made: end -->``."""

FILES: Final[Mapping[str, Callable[[], str]]] = {
    "monitoring/dcgm-names.yaml": dcgm.rules,
    "components/prometheus-operator/prometheus-rule.yaml": metrics.prometheus_rule,
}
"""Files that are made as a whole, among the manifests of Kubernetes."""


def _made() -> Iterator[tuple[str, str]]:
    """Every file that is made, with what it should have."""
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
    """The files of docs/ that are not what the code says."""
    found = []
    for name, text in _made():
        try:
            fresh = _read(name) == text
        except FileNotFoundError:
            fresh = False
        found += [] if fresh else [name]
    return found


def write() -> list[str]:
    """Write what is stale.

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
