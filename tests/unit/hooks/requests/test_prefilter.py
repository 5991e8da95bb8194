"""The prefilter decides whether a spec needs the engine, and agrees with the parsed request."""

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
from hooks.requests.oci_hooks import LISTS
from hooks.requests.prefilter import Prefilter, Settings, find_work, lists_nodes, read_settings
from hooks.requests.request import read_request


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Settings]:
    """Parse settings from the content of a configuration."""
    file = tmp_path / "config.toml"
    monkeypatch.setenv("NVSHIM_CONFIG", str(file))

    def of(content: str) -> Settings:
        file.write_text(content)
        return read_settings()

    return of


def named(settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return settings.config.swarm_resources, settings.config.annotation_prefixes


USUAL = named(Settings())


def found(spec: Any, **config: Any) -> Prefilter:
    return find_work(spec, Settings(Config(**config)))


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
        ["NVIDIA_VISIBLE_DEVICES= , "],
        ["NVIDIA_VISIBLE_DEVICES=0,void"],
        ["INTEL_VISIBLE_DEVICES=none"],
    ],
)
def test_container_that_requests_nothing_is_filtered_out(environment: list[str]) -> None:
    spec = {
        "process": {"env": environment},
        "annotations": {"io.kubernetes.cri.container-type": "container"},
        "mounts": [{"destination": "/proc"}, {"destination": "/var/run/secrets"}],
        "hooks": {"prestart": [{"path": "/bin/true"}]},
    }
    assert found(spec) == Prefilter(
        requests=False, lists_nodes=False, wants_more=False, counts_nodes=False, needs_worker=False
    )


NAMES = [
    "NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION", "NVIDIA_REQUIRE_CUDA", "AMD_VISIBLE_DEVICES",
    "INTEL_VISIBLE_DEVICES", "SWARM", "PATH", "NVIDIA_GDS", "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_IMEX_CHANNELS",
]  # fmt: skip
ITEM = st.sampled_from(
    [
        "0", "all", "void", "none", "", " ", "nonsense", "nvidia.com/gpu=0", "nvidia.com/gpu=",
        "nvidia.com/gds=all", "nvidia.com/imex-channel=1", "amd.com/gpu=0", "vendor/class", "9.0",
    ]
)  # fmt: skip
TEXT = st.lists(ITEM, max_size=3).map(",".join)
ENTRY = st.builds("{}={}".format, st.sampled_from(NAMES), TEXT)
BELOW = [
    "0",
    "void",
    "imex",
    "imex/0",
    "imex/x",
    "cdi",
    "cdi/a.com/b/c",
    "cdi/a.com/b=c",
    "cdi/x/y",
]
MOUNT = st.fixed_dictionaries(
    {
        "source": st.sampled_from(["/dev/null", "/x"]),
        "destination": st.sampled_from(
            [
                "/x",
                "/var/run/nvidia-container-devices",
                "//var/./run//nvidia-container-devices/../nvidia-container-devices/0/",
                "var/run/nvidia-container-devices/0",
                *(f"/var/run/nvidia-container-devices/{name}" for name in BELOW),
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
                ["x", "oci-hook", "--", "/nvidia-container-cli", "configure", "/"],
                ["x", "oci-hook", "--", "/nvidia-container-cli", "configure", "--device=", "/"],
                None,
            ]
        )
    },
)  # fmt: skip
# Invalid values, in any place.
WRONG: st.SearchStrategy[Any] = st.sampled_from([None, 0, "x", [], [0], {}, {"x": 0}, [{}], [None]])
SPEC = st.fixed_dictionaries(
    {},
    optional={
        "process": st.fixed_dictionaries({"env": st.lists(ENTRY, max_size=4) | WRONG}) | WRONG,
        "annotations": st.dictionaries(
            st.sampled_from(["cdi.k8s.io/a", "mine.io/a", "nvidia.cdi.k8s.io/pod", "x"]),
            TEXT | WRONG,
            max_size=2,
        )
        | WRONG,
        "mounts": st.lists(MOUNT, max_size=3) | WRONG,
        "hooks": st.dictionaries(
            st.sampled_from(LISTS), st.lists(HOOK, max_size=2) | WRONG, max_size=2
        )
        | WRONG,
    },
)
CONFIG = st.builds(
    Config,
    swarm_resources=st.sampled_from([(), ("SWARM",), ("SWARM", "PATH")]),
    annotation_prefixes=st.sampled_from([("cdi.k8s.io/",), ("cdi.k8s.io/", "mine.io/")]),
    accept_mounts=st.booleans(),
    trusted_namespaces=st.sampled_from([(), ("",)]),
    default_kind=st.sampled_from(["nvidia.com/gpu", "amd.com/gpu"]),
)
LIKELY = st.fixed_dictionaries(
    {"process": st.fixed_dictionaries({"env": st.lists(ENTRY, max_size=4)})},
    optional={
        "annotations": st.dictionaries(
            st.sampled_from(["cdi.k8s.io/a", "mine.io/a", "nvidia.cdi.k8s.io/pod", "x"]),
            TEXT,
            max_size=2,
        ),
        "mounts": st.none() | st.lists(MOUNT, max_size=3),
    },
)


@given(LIKELY | SPEC, CONFIG)
def test_prefilter_and_request_never_disagree(spec: dict[str, Any], config: Config) -> None:
    try:
        requests = read_request(spec, config).wants_injection
    except NvshimError:
        requests = True
    assert find_work(spec, Settings(config)).requests is requests


def test_configuration_that_names_places_is(settings: Callable[[str], Settings]) -> None:
    result = settings('[requests]\nswarm-resources = ["A"]\nannotation-prefixes = ["b.c/"]\n')
    assert named(result) == (("A",), ("b.c/",))
    assert named(settings("# nothing\n")) == USUAL
    assert named(settings('requests."swarm-resources" = ["A"]\n')) == (("A",), USUAL[1])
    assert named(settings('[requests]\n"swarm\\u002dresources" = ["A"]\n')) == (("A",), USUAL[1])


def test_malformed_configuration_names_no_places_and_says_why(
    settings: Callable[[str], Settings],
) -> None:
    result = settings("[requests]\nswarm-resources = 1\n")
    assert named(result) == USUAL
    assert "NVSHIM-E0504" in result.failure


def test_places_are_those_of_the_file_that_the_configuration_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, nvidias = tmp_path / "ours", tmp_path / "nvidias"
    monkeypatch.setattr(config, "DEFAULT_PATH", str(ours))
    monkeypatch.setattr(config, "NVIDIA_PATH", str(nvidias))
    monkeypatch.delenv("NVSHIM_CONFIG", raising=False)
    assert named(read_settings()) == USUAL
    nvidias.write_text('swarm-resource = "A,B"\n')
    assert named(read_settings()) == (("A", "B"), USUAL[1])
    ours.write_text('[requests]\nswarm-resources = ["C"]\n')
    assert named(read_settings()) == (("C",), USUAL[1])
    monkeypatch.setenv("NVSHIM_CONFIG", str(nvidias.parent))
    assert "Is a directory" in read_settings().failure
    monkeypatch.setenv("NVSHIM_CONFIG", str(nvidias.parent / "none"))
    assert named(read_settings()) == USUAL


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


def test_limits_are_seen_without_parsing(settings: Callable[[str], Settings]) -> None:
    assert settings('[sharing]\nholders = "exclusive"').limited
    assert settings('[sharing]\n"hold\\u0065rs" = "exclusive"').limited
    assert not settings("[node]\n").limited
    assert not Settings().limited


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
    assert not found(spec).wants_more
    spec["linux"] = {"devices": [{"path": "/dev/nvidia0"}]}
    assert found(spec).wants_more is more
    assert not found({"process": None, "linux": spec["linux"]}).wants_more


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
    assert found({"process": {}, "linux": linux}).needs_worker is needs
