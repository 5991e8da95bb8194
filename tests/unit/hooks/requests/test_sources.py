"""Where a request stands in a spec, which of the places holds, and what else it brings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hooks.config import Config
from hooks.errors import MalformedChannel, MalformedDevice, MalformedMigAccess, MalformedSpec
from hooks.requests.glance import is_nvidia_hook, may_ask
from hooks.requests.request import Request, read_request
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    IMEX,
    AllDevices,
    Feature,
    GpuIndex,
    GpuUuid,
    MigInstance,
    NamedDevices,
    NoDevices,
    Origin,
    Void,
)
from integration.node.options import DRA_DRIVER

UUID = "8ef4a8d0-0123-4567-89ab-00decafc0ffe"
DEVICES = "NVIDIA_VISIBLE_DEVICES"
BELOW = "/var/run/nvidia-container-devices"


def spec_of(
    *environment: str, annotations: Any = None, mounts: Any = (), hooks: Any = None
) -> dict[str, Any]:
    spec: dict[str, Any] = {"process": {"env": list(environment)}}
    if annotations is not None:
        spec["annotations"] = annotations
    spec["mounts"] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    spec["mounts"] += [
        {"destination": f"{BELOW}/{name}", "type": "bind", "source": "/dev/null"} for name in mounts
    ]
    if hooks is not None:
        spec["hooks"] = hooks
    return spec


def hook(path: str = "/usr/bin/nvidia-container-runtime-hook", *arguments: str) -> dict[str, Any]:
    return {"path": path, "args": [path, *(arguments or ("prestart",))], "env": ["A=b"]}


def gpus(*indices: int) -> NamedDevices:
    return NamedDevices(tuple(map(GpuIndex, indices)))


def read(*environment: str, config: Config | None = None, **spec: Any) -> Request:
    """The request, for which a glance has to say that there may be one."""
    request = read_request(spec_of(*environment, **spec), config)
    if config is None:
        assert may_ask(spec_of(*environment, **spec)) or not request.wants_injection
    return request


# NVIDIA's behaviours, and ours. The first column is what NVIDIA Container Toolkit 1.20 makes of
# the request in its default mode, as it was observed; docs/architecture.md has the reasons.
SAME, MORE, SAFER = "same", "NVIDIA refuses it", "NVIDIA ignores it"
CDI = "cdi.k8s.io/plugin"


@pytest.mark.parametrize(
    ("nvidia", "spec", "devices", "origin"),
    [
        (SAME, spec_of(f"{DEVICES}=0,1"), gpus(0, 1), Origin.ENVIRONMENT),
        (SAME, spec_of(f"{DEVICES}=none"), NoDevices(), Origin.ENVIRONMENT),
        (SAME, spec_of(f"{DEVICES}=0,all"), AllDevices(), Origin.ENVIRONMENT),
        (SAME, spec_of(f"{DEVICES}=all,void"), Void(), Origin.ENVIRONMENT),
        (SAME, spec_of("CUDA_VERSION=9.0"), AllDevices(), Origin.ENVIRONMENT),
        (SAME, spec_of(f"{DEVICES}=runtime.nvidia.com/gpu=all"), AllDevices(), Origin.ENVIRONMENT),
        (MORE, spec_of(f"{DEVICES}=0-2"), gpus(0, 1, 2), Origin.ENVIRONMENT),
        (MORE, spec_of(f"{DEVICES}=nvidia.com/gpu=0,1"), gpus(0, 1), Origin.ENVIRONMENT),
        (
            MORE,
            spec_of(f"{DEVICES}=GPU-8EF4"),
            NamedDevices((GpuUuid("GPU-8ef4"),)),
            Origin.ENVIRONMENT,
        ),
        (SAME, spec_of(mounts=["0", "1"]), gpus(0, 1), Origin.MOUNTS),
        (SAME, spec_of(mounts=["all"]), AllDevices(), Origin.MOUNTS),
        (SAME, spec_of(mounts=["void"]), Void(), Origin.MOUNTS),
        (SAME, spec_of(mounts=["cdi/nvidia.com/gpu/1"]), gpus(1), Origin.MOUNTS),
        (SAME, spec_of(mounts=["cdi/nvidia.com/gpu=1", "0"]), gpus(0, 1), Origin.MOUNTS),
        (
            MORE,
            spec_of(mounts=[f"MIG-GPU-{UUID}/1/0"]),
            NamedDevices((MigInstance(f"GPU-{UUID}", 1, 0),)),
            Origin.MOUNTS,
        ),
        # A device plugin that mounts the names sets the variable to where they are.
        (SAME, spec_of(f"{DEVICES}={BELOW}", mounts=["2"]), gpus(2), Origin.MOUNTS),
        (SAME, spec_of(f"{DEVICES}=all", mounts=["2"]), gpus(2), Origin.MOUNTS),
        (SAME, spec_of(annotations={CDI: "nvidia.com/gpu=0"}), gpus(0), Origin.ANNOTATIONS),
        (
            SAME,
            spec_of(
                f"{DEVICES}=all", annotations={CDI: "nvidia.com/gpu=0"}, mounts=["2"]
            ),
            gpus(0),
            Origin.ANNOTATIONS,
        ),
        # containerd has applied the annotation's CDI devices, and said so.
        (
            SAME,
            spec_of(f"{DEVICES}=void", annotations={CDI: "nvidia.com/gpu=0"}),
            gpus(0),
            Origin.ANNOTATIONS,
        ),
        (SAME, spec_of(f"{DEVICES}=all", f"{DEVICES}=void"), Void(), Origin.ENVIRONMENT),
        # An annotation that is of another vendor's devices alone takes nobody's GPU away.
        (
            SAFER,
            spec_of(f"{DEVICES}=GPU-{UUID}", annotations={CDI: "rdma.example.com/nic=0"}),
            NamedDevices((GpuUuid(f"GPU-{UUID}"),)),
            Origin.ENVIRONMENT,
        ),
        (
            SAME,
            spec_of(f"{DEVICES}=1", hooks={"prestart": [hook()]}),
            gpus(1),
            Origin.DOCKER,
        ),
        (
            SAME,
            spec_of(f"{DEVICES}=1", hooks={"createRuntime": [hook()]}),
            gpus(1),
            Origin.ENVIRONMENT,
        ),
    ],
)  # fmt: skip
def test_place_holds(nvidia: str, spec: dict[str, Any], devices: object, origin: str) -> None:
    request = read_request(spec)
    assert (request.devices, request.origin) == (devices, origin)
    assert may_ask(spec) or not request.wants_injection


def test_annotations_are_read_by_name_and_name_kinds() -> None:
    request = read(
        annotations={
            "cdi.k8s.io/b": "nvidia.com/gpu=1,amd.com/gpu=0",
            "cdi.k8s.io/a": "nvidia.com/gpu=0",
            "other.io/a": "not a device",
        }
    )
    assert request.devices == gpus(0, 1)
    assert request.cdi_devices == ("amd.com/gpu=0",)
    assert request.cdi_origin == Origin.ANNOTATIONS
    assert "cdi.k8s.io/a=nvidia.com/gpu=0" in request.source


@pytest.mark.parametrize("default_kind", ["nvidia.com/gpu", "amd.com/gpu"])
def test_annotation_without_a_kind_gives_nothing_and_takes_nothing(default_kind: str) -> None:
    config = Config(default_kind=default_kind)
    named = f"{DEVICES}=nvidia.com/gpu=2"
    for value in ("1", "all", "none", "void", "0-3", "GPU-8EF4", "1:0", " 1 , all ", ",1"):
        assert read(annotations={CDI: value}, config=config) == Request(Void())
        assert read(named, annotations={CDI: value}, config=config).devices == gpus(2)
        # Nor does the kind of one annotation hold for the next.
        several = {"cdi.k8s.io/a": "nvidia.com/gpu=0", "cdi.k8s.io/b": f"{value},nvidia.com/gpu=3"}
        assert read(annotations=several, config=config).devices == gpus(0, 3)


def test_devices_of_other_vendors_are_those_of_the_first_place_that_names_any() -> None:
    annotations = {CDI: "rdma.example.com/nic=0"}
    request = read(f"{DEVICES}=0,amd.com/gpu=all", annotations=annotations)
    assert request.cdi_devices == ("rdma.example.com/nic=0",)
    assert (request.cdi_origin, request.origin) == (Origin.ANNOTATIONS, Origin.ENVIRONMENT)
    alone = read(f"{DEVICES}=amd.com/gpu=0")
    assert (alone.devices, alone.cdi_devices) == (Void(), ("amd.com/gpu=0",))
    assert alone.cdi_origin == Origin.ENVIRONMENT
    assert alone.capabilities == frozenset()
    assert alone.wants_injection
    assert not alone.wants_driver


@pytest.mark.parametrize(
    "named",
    [
        "k8s.device-plugin.nvidia.com/gpu=GPU-8ef4a8d0",
        "nvidia.com/gpu=of-a-file",
        "k8s.gpu.nvidia.com/claim=7-0",
        f"k8s.{DRA_DRIVER}/claim=7-gpu-0",
    ],
)
def test_image_of_a_container_that_cdi_gives_a_gpu_gets_no_other(named: str) -> None:
    for place in ({"annotations": {CDI: named}}, {"mounts": [f"cdi/{named}"]}):
        request = read(f"{DEVICES}=all", **place)
        assert (request.devices, request.cdi_devices) == (Void(), (named,))
    # What is no GPU takes none away.
    other = read(f"{DEVICES}=0", annotations={CDI: "k8s.device-plugin.nvidia.com/imex-channel=0"})
    assert other.devices == gpus(0)


def test_swarm_variable_of_an_image_is_not_what_dockers_gpus_asked() -> None:
    config = Config(swarm_resources=("DOCKER_RESOURCE_GPU",))
    variables = ("DOCKER_RESOURCE_GPU=all", f"{DEVICES}=0")
    assert read(*variables, config=config).devices == AllDevices()
    hooked = read(*variables, config=config, hooks={"prestart": [hook()]})
    assert (hooked.devices, hooked.origin) == (gpus(0), Origin.DOCKER)


def test_mount_that_is_no_name_of_a_device_is_none() -> None:
    spec = spec_of()
    spec["mounts"] += [
        {"destination": BELOW, "source": "/dev/null"},
        {"destination": f"{BELOW}/0", "source": "/dev/zero"},
        {"destination": "/var/run/nvidia-container-devices2/0", "source": "/dev/null"},
        {"destination": f"{BELOW}/../0", "source": "/dev/null"},
        {"destination": 1, "source": "/dev/null"},
        {},
    ]
    assert read_request(spec) == Request(Void())
    spec["mounts"] += [
        {"destination": "/var//run/./nvidia-container-devices/3/", "source": "/dev/null"}
    ]
    assert read_request(spec).devices == gpus(3)


def test_what_variables_alone_ask_for_is_told_from_what_a_list_names() -> None:
    variables = ("NVIDIA_NVSWITCH=enabled", "NVIDIA_GDS=enabled", "NVIDIA_IMEX_CHANNELS=all")
    own = frozenset({Feature.NVSWITCH, Feature.GDS, IMEX})
    assert read(*variables, mounts=["0"]).only_variables == own
    request = read(*variables, mounts=["0", "imex/0", "cdi/nvidia.com/nvswitch/all"])
    assert request.only_variables == {Feature.GDS}
    assert request.imex_channels == (0,)


def test_channels_of_mounts_come_before_those_of_the_variable() -> None:
    both = read("NVIDIA_IMEX_CHANNELS=7", mounts=["0", "imex/2", "imex/channel1"])
    assert both.imex_channels == (2, 1)
    assert read("NVIDIA_IMEX_CHANNELS=7", mounts=["0"]).imex_channels == (7,)
    with pytest.raises(MalformedChannel):
        read(mounts=["imex/x"])


def test_configuration_says_where_to_look() -> None:
    config = Config(
        swarm_resources=("DOCKER_RESOURCE_GPU", "DOCKER_RESOURCE_B"),
        annotation_prefixes=("example.com/gpu_",),
        accept_mounts=False,
        default_kind="amd.com/gpu",
    )
    plain = replace(config, default_kind="nvidia.com/gpu")
    swarm = ["DOCKER_RESOURCE_GPU=1", f"{DEVICES}=all", "DOCKER_RESOURCE_B=3"]
    assert read(*swarm, config=plain).devices == gpus(1, 3)
    assert read(*swarm).devices == AllDevices()
    assert read("DOCKER_RESOURCE_GPU=", f"{DEVICES}=all", config=plain).devices == Void()
    annotations = {"example.com/gpu_a": "nvidia.com/gpu=0", CDI: "nvidia.com/gpu=1"}
    assert read(annotations=annotations, config=plain).devices == gpus(0)
    assert read(mounts=["0"], config=plain) == Request(Void())
    assert read(f"{DEVICES}=0", config=config).cdi_devices == ("amd.com/gpu=0",)


@pytest.mark.parametrize(
    "more", [{}, {"mounts": ["0"]}, {"annotations": {CDI: "nvidia.com/gpu=0"}}]
)
def test_variables_are_honoured_wherever_the_device_was_named(more: dict[str, Any]) -> None:
    environment = [] if more else [f"{DEVICES}=0"]
    request = read(
        *environment,
        "NVIDIA_DRIVER_CAPABILITIES=utility",
        "NVIDIA_GDS=enabled", "NVIDIA_MOFED=enabled", "NVIDIA_GDRCOPY=enabled",
        "NVIDIA_NVSWITCH=true",
        "NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_MIG_MONITOR_DEVICES= all ",
        "NVIDIA_IMEX_CHANNELS=all",
        "NVIDIA_REQUIRE_DRIVER=driver>=535", "NVIDIA_REQUIRE_CUDA=cuda>=12.0",
        "NVIDIA_REQUIRE_JETPACK=csv-mounts=all", "NVIDIA_REQUIRE_JETPACK_HOST=x",
        "NVIDIA_REQUIRE_NOTHING=",
        **more,
    )  # fmt: skip
    assert request.devices == gpus(0)
    assert request.capabilities == {"utility"}
    named = {Feature.GDS, Feature.MOFED, Feature.GDRCOPY}
    assert request.features == named | {Feature.MIG_CONFIG, Feature.MIG_MONITOR}
    assert request.imex_channels is None
    assert request.requirements == (
        ("NVIDIA_REQUIRE_CUDA", "cuda>=12.0"),
        ("NVIDIA_REQUIRE_DRIVER", "driver>=535"),
    )


def test_variables_ask_for_nothing_by_themselves() -> None:
    environment = [
        "NVIDIA_GDS=enabled", "NVIDIA_IMEX_CHANNELS=nonsense", "NVIDIA_MIG_CONFIG_DEVICES=0",
        "NVIDIA_DRIVER_CAPABILITIES=nonsense", "NVIDIA_REQUIRE_CUDA=cuda>=99",
    ]  # fmt: skip
    assert read(*environment) == Request(Void())
    assert not may_ask(spec_of(*environment))


@pytest.mark.parametrize("value", ["", "void", "none"])
def test_no_mig_access_is_asked(value: str) -> None:
    assert not read(f"{DEVICES}=0", f"NVIDIA_MIG_CONFIG_DEVICES={value}").features


def test_mig_access_to_one_device_is_an_error() -> None:
    with pytest.raises(MalformedMigAccess, match="MONITOR"):
        read(f"{DEVICES}=0", "NVIDIA_MIG_MONITOR_DEVICES=0")


@pytest.mark.parametrize("value", ["1", "t", "T", "true", "TRUE", "True"])
def test_requirements_can_be_turned_off(value: str) -> None:
    environment = [f"{DEVICES}=0", "NVIDIA_REQUIRE_CUDA=cuda>=99"]
    assert read(*environment, f"NVIDIA_DISABLE_REQUIRE={value}").requirements == ()
    for no in ("", "0", "false", "yes", "tRUE"):
        assert read(*environment, f"NVIDIA_DISABLE_REQUIRE={no}").requirements


@pytest.mark.parametrize(
    ("version", "requirement"),
    [
        ("9.0", "cuda>=9.0"), ("10.1.243", "cuda>=10.1"), (" 8.0 ", "cuda>=8.0"),
        ("latest", None), ("10", None), ("9.x", None), ("²·1", None), ("10.", None),
    ],
)  # fmt: skip
def test_legacy_image_requires_its_cuda(version: str, requirement: str | None) -> None:
    request = read(f"CUDA_VERSION={version}", f"{DEVICES}=0")
    expected = (("CUDA_VERSION", requirement),) if requirement else ()
    assert request.requirements == expected
    assert request.capabilities == CAPABILITIES
    modern = read(f"CUDA_VERSION={version}", "NVIDIA_REQUIRE_CUDA=cuda>=9.0", f"{DEVICES}=0")
    assert modern.requirements == (("NVIDIA_REQUIRE_CUDA", "cuda>=9.0"),)
    assert modern.capabilities == DEFAULT_CAPABILITIES


@pytest.mark.parametrize(
    ("value", "asked"),
    [("0", "0"), (" all ", "all"), ("", ""), ("void", ""), ("none", ""), ("0,void", ""), (",", "")],
)
def test_other_vendors_variables_are_kept_as_they_are(value: str, asked: str) -> None:
    request = read(f"AMD_VISIBLE_DEVICES={value}", f"INTEL_VISIBLE_DEVICES={value}")
    said = f"AMD_VISIBLE_DEVICES={asked} INTEL_VISIBLE_DEVICES={asked}" if asked else ""
    origin = Origin.ENVIRONMENT if asked else Origin.NOBODY
    assert request == Request(
        Void(), amd_devices=asked, intel_devices=asked, origin=origin, source=said
    )
    assert request.wants_injection == bool(asked)


@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
@pytest.mark.parametrize("environment", [[], [f"{DEVICES}=void"]])
def test_hook_of_nvidias_is_found_even_if_nothing_is_asked(
    stage: str, environment: list[str]
) -> None:
    request = read(*environment, hooks={stage: [hook()], "poststart": None})
    assert request.devices == Void()
    assert request.hooked
    assert request.wants_injection
    assert not request.wants_driver


@pytest.mark.parametrize(
    ("entry", "is_it"),
    [
        (hook(), True),
        (hook("/usr/local/nvidia/toolkit/nvidia-container-toolkit"), True),
        (hook("nvidia-container-toolkit"), True),
        (hook("/x/nvidia-container-toolkit", "-config", "/c.toml", "prestart"), True),
        (hook("/x/nvidia-container-toolkit", "poststop"), False),
        (hook("/x/my-nvidia-container-toolkit"), False),
        (hook("/x/nvidia-container-toolkit/hook"), False),
        ({"path": "/x/nvidia-container-toolkit"}, False),
        ({"path": "/x/nvidia-container-toolkit", "args": ["prestart"]}, False),
        ({"path": 1, "args": []}, False),
        ({"path": "/x/nvidia-container-toolkit", "args": "prestart"}, False),
        ("nvidia-container-toolkit", False),
    ],
)
def test_hook_of_nvidias_is_told_from_others(entry: object, is_it: bool) -> None:
    assert is_nvidia_hook(entry) == is_it


@pytest.mark.parametrize(
    "part",
    [
        {"annotations": []},
        {"annotations": {"cdi.k8s.io/x": 1}},
        {"mounts": {}},
        {"mounts": ["/a"]},
        {"hooks": []},
        {"hooks": {"prestart": {}}},
    ],
)
def test_misshapen_part_is_a_typed_error(part: dict[str, Any]) -> None:
    with pytest.raises(MalformedSpec):
        read_request({"process": {}, **part})


def test_error_says_where_the_name_stands() -> None:
    with pytest.raises(MalformedDevice, match=r"cdi\.k8s\.io/plugin=x/y"):
        read(annotations={CDI: "x/y"})
    with pytest.raises(MalformedDevice, match="mounts below /var/run"):
        read(mounts=["x/y"])
