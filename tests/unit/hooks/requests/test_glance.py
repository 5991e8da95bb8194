from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import NvshimError
from hooks import config
from hooks.config import Config
from hooks.requests.glance import (
    Places,
    find_places,
    lists_nodes,
    may_ask,
    may_want_more,
    needs_worker,
)
from hooks.requests.oci_hooks import LISTS
from hooks.requests.request import read_request


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Places]:
    """What is found if this is the content of the configuration."""
    file = tmp_path / "config.toml"
    monkeypatch.setenv("NVSHIM_CONFIG", str(file))

    def of(content: str) -> Places:
        file.write_text(content)
        return find_places()

    return of


def told(places: Places) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return places.variables, places.prefixes


USUAL = told(Places())


@pytest.mark.parametrize(
    "environment",
    [
        [],
        ["PATH=/bin", "NVIDIA_DRIVER_CAPABILITIES=all", "NVIDIA_REQUIRE_CUDA=cuda>=99"],
        ["NVIDIA_VISIBLE_DEVICES="],
        ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"],
        ["CUDA_VERSION=9.0", "NVIDIA_VISIBLE_DEVICES=void"],
        ["CUDA_VERSION=9.0", "NVIDIA_REQUIRE_CUDA=cuda>=9.0"],
        ["AMD_VISIBLE_DEVICES=void"],
    ],
)
def test_container_that_asks_for_nothing_is_told_at_a_glance(environment: list[str]) -> None:
    spec = {
        "process": {"env": environment},
        "annotations": {"io.kubernetes.cri.container-type": "container"},
        "mounts": [{"destination": "/proc"}, {"destination": "/var/run/secrets"}],
        "hooks": {"prestart": [{"path": "/bin/true"}]},
    }
    assert not may_ask(spec)


TEXT = st.sampled_from(
    ["0", "all", "void", "none", "", "nonsense", "nvidia.com/gpu=0", "amd.com/gpu=0", "9.0"]
)
NAMES = [
    "NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION", "NVIDIA_REQUIRE_CUDA", "AMD_VISIBLE_DEVICES",
    "INTEL_VISIBLE_DEVICES", "SWARM", "PATH", "NVIDIA_GDS",
]  # fmt: skip
ENTRY = st.builds("{}={}".format, st.sampled_from(NAMES), TEXT)
MOUNT = st.fixed_dictionaries(
    {
        "source": st.sampled_from(["/dev/null", "/x"]),
        "destination": st.sampled_from(
            [
                "/x",
                "/var/run/nvidia-container-devices/0",
                "//var/./run//nvidia-container-devices/../nvidia-container-devices/0/",
                "var/run/nvidia-container-devices/0",
            ]
        ),
    }
)
HOOK = st.fixed_dictionaries(
    {"path": st.sampled_from(["/x/nvidia-container-toolkit", "/x/nvidia-cdi-hook", "/x"])},
    optional={
        "args": st.sampled_from(
            [
                ["x", "prestart"], ["x", "update-ldcache"], ["x", "update-ldcache", "--x"], ["x"],
                ["x", "oci-hook", "--", "/nvidia-container-cli", "configure", "/"], None,
            ]
        )
    },
)  # fmt: skip
SPEC = st.fixed_dictionaries(
    {"process": st.fixed_dictionaries({"env": st.lists(ENTRY, max_size=4)})},
    optional={
        "annotations": st.dictionaries(
            st.sampled_from(["cdi.k8s.io/a", "mine.io/a", "x"]), TEXT, max_size=2
        ),
        "mounts": st.none() | st.lists(MOUNT, max_size=2),
        "hooks": st.none()
        | st.dictionaries(
            st.sampled_from(LISTS),
            st.none() | st.lists(HOOK, max_size=2),
            max_size=2,
        ),
    },
)


@given(SPEC)
def test_glance_never_misses_who_asks(spec: dict[str, Any]) -> None:
    config = Config(swarm_resources=("SWARM",), annotation_prefixes=("cdi.k8s.io/", "mine.io/"))
    places = Places(config.swarm_resources, config.annotation_prefixes)
    try:
        asks = read_request(spec, config).wants_injection
    except NvshimError:
        asks = True
    assert may_ask(spec, places) or not asks


def test_configuration_that_names_places_is(places: Callable[[str], Places]) -> None:
    found = places('[requests]\nswarm-resources = ["A"]\nannotation-prefixes = ["b.c/"]\n')
    assert told(found) == (("A",), ("b.c/",))
    assert told(places("# nothing\n")) == USUAL
    assert told(places('requests."swarm-resources" = ["A"]\n')) == (("A",), USUAL[1])
    assert told(places('[requests]\n"swarm\\u002dresources" = ["A"]\n')) == (("A",), USUAL[1])


def test_malformed_configuration_names_no_places_and_says_why(
    places: Callable[[str], Places],
) -> None:
    found = places("[requests]\nswarm-resources = 1\n")
    assert told(found) == USUAL
    assert "NVSHIM-E0504" in found.failure


def test_places_are_those_of_the_file_that_the_configuration_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, nvidias = tmp_path / "ours", tmp_path / "nvidias"
    monkeypatch.setattr(config, "DEFAULT_PATH", str(ours))
    monkeypatch.setattr(config, "NVIDIA_PATH", str(nvidias))
    monkeypatch.delenv("NVSHIM_CONFIG", raising=False)
    assert told(find_places()) == USUAL
    nvidias.write_text('swarm-resource = "A,B"\n')
    assert told(find_places()) == (("A", "B"), USUAL[1])
    ours.write_text('[requests]\nswarm-resources = ["C"]\n')
    assert told(find_places()) == (("C",), USUAL[1])
    monkeypatch.setenv("NVSHIM_CONFIG", str(nvidias.parent))
    assert "Is a directory" in find_places().failure
    monkeypatch.setenv("NVSHIM_CONFIG", str(nvidias.parent / "none"))
    assert told(find_places()) == USUAL


@pytest.mark.parametrize(
    ("linux", "lists"),
    [
        ({"devices": [{"path": "/dev/null"}, {"path": "/dev/nvidia0"}]}, True),
        ({"devices": [{"path": "/dev/null"}]}, False),
        ({"devices": [3]}, False),
        ({"devices": 3}, False),
        ({}, False),
        (None, False),
    ],
)
def test_nodes_that_a_spec_lists_are_seen(linux: Any, *, lists: bool) -> None:
    assert lists_nodes({"linux": linux}) == lists
    assert not lists_nodes({})


def test_limits_are_seen_without_parsing(places: Callable[[str], Places]) -> None:
    assert places('[sharing]\nholders = "exclusive"').limited
    assert places('[sharing]\n"hold\\u0065rs" = "exclusive"').limited
    assert not places("[node]\n").limited
    assert not Places().limited


@pytest.mark.parametrize(
    ("value", "more"),
    [
        (None, False), ("", False), ("compute", False), (" utility , compute ,", False),
        ("video", True), ("compute,graphics", True), ("all", True), ("nonsense", True),
    ],
)  # fmt: skip
def test_more_is_wanted_by_who_has_nodes_and_names_more_than_the_usual(
    value: str | None, *, more: bool
) -> None:
    environment = ["NVIDIA_DRIVER_CAPABILITIES=all", f"NVIDIA_DRIVER_CAPABILITIES={value}"]
    spec: dict[str, Any] = {"process": {"env": environment if value is not None else []}}
    assert not may_want_more(spec)
    spec["linux"] = {"devices": [{"path": "/dev/nvidia0"}]}
    assert may_want_more(spec) is more
    assert not may_want_more({"process": None, "linux": spec["linux"]})


@pytest.mark.parametrize(
    ("linux", "needs"),
    [
        ({"devices": [{"path": "/dev/dri/card0"}], "uidMappings": [{}]}, True),
        ({"devices": [{"path": "/dev/kfd"}], "uidMappings": [{}]}, True),
        ({"devices": [{"path": "/dev/nvidia0"}], "uidMappings": [{}]}, True),
        ({"devices": [{"path": "/dev/fuse"}], "uidMappings": [{}]}, False),
        ({"devices": [{"path": "/dev/dri/card0"}]}, False),
        ({"devices": [3], "uidMappings": [{}]}, False),
        ({"devices": 3, "uidMappings": 3}, False),
        (None, False),
    ],
)
def test_nodes_of_gpus_that_a_spec_lists_are_work_in_a_user_namespace(
    linux: Any, *, needs: bool
) -> None:
    assert needs_worker({"linux": linux}, Places()) is needs
