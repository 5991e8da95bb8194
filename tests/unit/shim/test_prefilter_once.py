"""The prefilter runs once per container: when its shim starts, or in Create."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hooks.requests.prefilter import prefilter
from shim.work import injection


class Shim:
    """A shim that was started in a container's bundle."""

    def __init__(self, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bundle = str(bundle)
        self.config = bundle / "config.json"
        self.worker = Mock()
        self.fork = Mock(return_value=self.worker)
        self.prefilter = Mock(side_effect=prefilter)
        monkeypatch.setenv("NVSHIM_CONFIG", str(bundle / "no.toml"))
        (bundle / "no.toml").write_text("")
        monkeypatch.setattr(injection, "_fork", self.fork)
        monkeypatch.setattr(injection, "prefilter", self.prefilter)
        monkeypatch.setattr(injection, "_ahead", {})

    def start(self, spec: dict[str, Any]) -> None:
        self.config.write_text(json.dumps(spec))
        injection.look_ahead(self.bundle, Mock(), Mock())

    def create(self, spec: dict[str, Any]) -> bool:
        return injection.prefilter_once(self.bundle, spec).requests


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shim:
    return Shim(tmp_path, monkeypatch)


def spec_with(devices: str) -> dict[str, Any]:
    return {"process": {"env": [f"NVIDIA_VISIBLE_DEVICES={devices}"]}}


@pytest.mark.parametrize(("devices", "requests"), [("void", False), ("all", True)])
def test_create_uses_what_was_decided_at_the_start(
    shim: Shim, devices: str, *, requests: bool
) -> None:
    shim.start(spec_with(devices))
    assert shim.create(spec_with(devices)) is requests
    assert shim.prefilter.call_count == 1
    assert shim.fork.call_count == requests
    assert shim.worker.end.call_count == 0


@pytest.mark.parametrize("devices", ["void", "all"])
def test_nothing_is_kept_of_a_container_without_gpus(shim: Shim, devices: str) -> None:
    shim.start(spec_with(devices))
    shim.create(spec_with(devices))
    # provide takes the worker of the other one.
    assert bool(injection._ahead) is (devices == "all")


@pytest.mark.parametrize("devices", ["void", "all"])
def test_spec_that_was_edited_since_is_decided_again(shim: Shim, devices: str) -> None:
    shim.start(spec_with(devices))
    assert shim.create(spec_with("0"))
    assert shim.prefilter.call_count == 2
    assert shim.worker.end.call_count == (devices == "all")
    assert not injection._ahead


def test_create_decides_for_a_container_that_came_later(shim: Shim) -> None:
    assert shim.create(spec_with("all"))
    assert shim.prefilter.call_count == 1


def test_bundle_without_a_spec_is_for_create_to_report(shim: Shim) -> None:
    injection.look_ahead(shim.bundle, Mock(), Mock())
    assert not injection._ahead
