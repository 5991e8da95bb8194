"""Nodes and bundles for inspection."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.containers.bundles import TASKS
from tests.unit.hooks.fake_node import Node


@pytest.fixture(autouse=True)
def _no_configuration_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVSHIM_CONFIG", "NVIDIA_CTK_CONFIG_FILE_PATH", "NVSHIM_CONTAINERD_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hooks.config.DEFAULT_PATH", "/nonexistent/config.toml")
    monkeypatch.setattr("hooks.config.NVIDIA_PATH", "/nonexistent/nvidia.toml")


@pytest.fixture
def config_file(node: Node, tmp_path: Path) -> str:
    roots = {
        "driver-root": node.config.driver_root,
        "dev": node.config.dev,
        "proc": node.config.proc,
        "sys": node.config.sys,
        "state": node.config.state,
    }
    lines = [f"{key} = {json.dumps(path)}" for key, path in roots.items()]
    file = tmp_path / "config.toml"
    file.write_text("[node]\n" + "\n".join(lines))
    return str(file)


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., str]:
    """Return a function that makes a bundle, by default with a process outside of containers."""

    def make(
        name: str,
        *,
        namespace: str = "k8s.io",
        annotations: dict[str, str] | None = None,
        record: dict[str, Any] | None = None,
        before: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
        **files: str,
    ) -> str:
        bundle = str(tmp_path / "state" / TASKS / namespace / name)
        os.makedirs(bundle)
        whole = {"annotations": annotations or {}, "process": {"env": []}, **(spec or {})}
        documents = {"config.json": whole, "nvidia.json": record, "nvidia-before.json": before}
        for file, document in documents.items():
            if document is not None:
                with open(f"{bundle}/{file}", "w") as opened:
                    json.dump(document, opened)
        for file, text in files.items():
            with open(f"{bundle}/{file.replace('_', '.')}", "w") as opened:
                opened.write(text)
        return bundle

    return make
