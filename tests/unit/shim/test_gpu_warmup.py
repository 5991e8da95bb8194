"""The fork server's warmup for containers with GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, NoReturn

import pytest

from hooks.config import Config
from hooks.node import cache
from hooks.node.inventory import load_inventory
from shim import files
from shim.forkserver import gpu_warmup

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.hooks.fake_node import Node

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
_SITE = os.path.join(REPOSITORY, ".cache", "site")


def test_a_warmup_leaves_nothing_and_decodes_no_inventory_of_the_nodes(tmp_path: Path) -> None:
    gpu_warmup.warm_up(str(tmp_path / "warmup"), 3)
    assert list(tmp_path.iterdir()) == []
    assert load_inventory(Config(state=str(tmp_path))) is None


def test_a_warmup_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    left = tmp_path / "warmup"
    (left / "rootfs" / "deep").mkdir(parents=True)
    (left / "nvidia-before.json").write_text("{}")
    gpu_warmup.warm_up(str(left), 1)
    assert not left.exists()


def test_a_warmup_that_is_told_to_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = files.remove_tree

    def remove_later(path: str) -> None:
        signal.raise_signal(signal.SIGTERM)  # to this thread; the fork server has no other
        remove(path)

    def end(*_: object) -> NoReturn:
        raise SystemExit

    monkeypatch.setattr(files, "remove_tree", remove_later)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            gpu_warmup.warm_up(str(tmp_path / "warmup"), 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []


def test_an_inventory_that_was_decoded_ahead_is_not_parsed_by_who_loads_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.take_inventory()
    cache.decode_ahead(node.config)
    expected = load_inventory(node.config)
    monkeypatch.setattr(json, "loads", pytest.fail)
    assert expected is not None
    assert load_inventory(node.config) == expected


@pytest.mark.parametrize("content", [None, "", "{}", '{"driver": 7}'])
def test_what_cannot_be_decoded_is_left_to_who_wants_it(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / cache.NAME).write_text(content)
        (tmp_path / cache.NAME).chmod(0o600)
    cache.decode_ahead(Config(state=str(tmp_path)))


_LOADED = f"""
import sys
sys.path += [{REPOSITORY!r}, {_SITE!r}]
import shim.pod.main, shim.work.provision
print(*sorted(sys.modules))
"""


def test_the_first_worker_of_a_node_waits_for_no_readers_of_cdi_files_and_platforms() -> None:
    argv = ["/usr/bin/python3", "-ISc", _LOADED]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    rare = {
        "yaml",
        "hooks.cdi",
        "hooks.platforms.tegra",
        "hooks.platforms.wsl",
    }
    assert loaded & (rare | {"shim.pod.server", "google.protobuf"}) == set()
