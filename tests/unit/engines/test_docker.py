"""Members of daemon.json that have other types than dockerd's, tested without a dockerd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.engines import plan_removal
from integration.engines.docker import Options


@pytest.mark.parametrize(
    "document",
    [
        {"default-runtime": ["nvidia"]},
        {"default-runtime": {"name": "nvidia"}, "runtimes": {"nvidia": {}}},
        {"default-runtime": "nvidia", "runtimes": 3},
        {"runtimes": "nvidia"},
        {"runtimes": ["nvidia"]},
        {"default-runtime": 1, "runtimes": None, "features": 3},
    ],
    ids=str,
)
def test_removal_reads_members_of_any_type(tmp_path: Path, document: Any) -> None:
    config = tmp_path / "daemon.json"
    config.write_text(json.dumps(document))
    options = Options(config=str(config), records=str(tmp_path / "records"))
    assert plan_removal(options).files == ()
