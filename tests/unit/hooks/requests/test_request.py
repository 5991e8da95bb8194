"""Golden table: the request in a spec, in every form.

``requests.json`` has for each case the fields in which the request differs from an empty one, or
the error. Each case also checks that the prefilter agrees.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import NvshimError
from hooks.config import Config
from hooks.errors import MalformedDevice, MalformedSpec, UnknownCapability
from hooks.requests.prefilter import Settings, find_work
from hooks.requests.request import Request, read_more, read_request
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    AllDevices,
    GpuIndex,
    NamedDevices,
    NoDevices,
    Origin,
    Void,
)
from integration.node.options import DRA_DRIVER
from tests.harness.raising import is_error
from tests.unit.hooks.golden import Golden

GOLDEN = Golden("requests.json")
UUID = "8ef4a8d0-0123-4567-89ab-00decafc0ffe"
DEVICES = "NVIDIA_VISIBLE_DEVICES"
CAPABLE = "NVIDIA_DRIVER_CAPABILITIES"
BELOW = "/var/run/nvidia-container-devices"
CDI = "cdi.k8s.io/plugin"
NIC = "rdma.example.com/nic=0"


@dataclass(frozen=True)
class Case:
    """The parts of a spec, with the default configuration."""

    environment: tuple[Any, ...] = ()
    annotations: Any = None
    mounts: tuple[str, ...] = ()  # names below BELOW
    hooks: Any = None
    config: Config | None = None
    more: tuple[Any, ...] = ()  # literal mounts
    spec: Any = None  # replaces all of the above

    def made(self) -> Any:
        if self.spec is not None:
            return self.spec
        mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
        mounts += [
            {"destination": f"{BELOW}/{name}", "type": "bind", "source": "/dev/null"}
            for name in self.mounts
        ]
        spec: dict[str, Any] = {"process": {"env": [*self.environment]}}
        spec["mounts"] = [*mounts, *self.more]
        for name in ("annotations", "hooks"):
            if (value := getattr(self, name)) is not None:
                spec[name] = value
        return spec


def env(*variables: Any, **more: Any) -> Case:
    return Case(variables, **more)


def cdi(*variables: str, names: str, **more: Any) -> Case:
    return Case(variables, annotations={CDI: names}, **more)


def hook(path: str = "/usr/bin/nvidia-container-runtime-hook", *arguments: str) -> dict[str, Any]:
    return {"path": path, "args": [path, *(arguments or ("prestart",))], "env": ["A=b"]}


def null(destination: Any, source: str = "/dev/null") -> dict[str, Any]:
    return {"destination": destination, "source": source}


EVERYTHING = (
    f"{CAPABLE}=utility",
    "NVIDIA_GDS=enabled", "NVIDIA_MOFED=enabled", "NVIDIA_GDRCOPY=enabled", "NVIDIA_NVSWITCH=true",
    "NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_MIG_MONITOR_DEVICES= all ", "NVIDIA_IMEX_CHANNELS=all",
    "NVIDIA_REQUIRE_DRIVER=driver>=535", "NVIDIA_REQUIRE_CUDA=cuda>=12.0",
    "NVIDIA_REQUIRE_JETPACK=csv-mounts=all", "NVIDIA_REQUIRE_JETPACK_HOST=x",
    "NVIDIA_REQUIRE_NOTHING=",
)  # fmt: skip
BY_VARIABLES = ("NVIDIA_NVSWITCH=enabled", "NVIDIA_GDS=enabled", "NVIDIA_IMEX_CHANNELS=all")
NONSENSE = (
    "NVIDIA_GDS=enabled", "NVIDIA_IMEX_CHANNELS=nonsense", "NVIDIA_MIG_CONFIG_DEVICES=0",
    f"{CAPABLE}=nonsense", "NVIDIA_REQUIRE_CUDA=cuda>=99",
)  # fmt: skip
SWARM = Config(swarm_resources=("DOCKER_RESOURCE_GPU", "DOCKER_RESOURCE_B"))
SWARMED = ("DOCKER_RESOURCE_GPU=1", f"{DEVICES}=all", "DOCKER_RESOURCE_B=3")
OF_AMD = Config(default_kind="amd.com/gpu")
PLACED = Config(annotation_prefixes=("example.com/gpu_",), accept_mounts=False)
MISSHAPEN: tuple[dict[str, Any], ...] = (
    {"annotations": []}, {"annotations": {"cdi.k8s.io/x": 1}}, {"mounts": {}}, {"mounts": ["/a"]},
    {"hooks": []}, {"hooks": {"prestart": {}}},
)  # fmt: skip
NO_CDI_NAMES = ("1", "all", "none", "void", "0-3", "GPU-8EF4", "1:0", " 1 , all ", ",1")
GIVEN_BY_CDI = (
    "k8s.device-plugin.nvidia.com/gpu=GPU-8ef4a8d0",
    "nvidia.com/gpu=of-a-file",
    "k8s.gpu.nvidia.com/claim=7-0",
    f"k8s.{DRA_DRIVER}/claim=7-gpu-0",
)
# Observed with NVIDIA Container Toolkit 1.20 in its default mode. A case that it refuses or ignores
# has that in its name; docs/architecture.md has the reasons.
CASES: dict[str, Case] = {
    **{
        f"variable {value!r}": env(f"{DEVICES}={value}")
        for value in ("", "0,1", "none", "all", "0,all", "all,void", "runtime.nvidia.com/gpu=all")
    },
    **{
        f"variable {value!r}, which NVIDIA refuses": env(f"{DEVICES}={value}")
        for value in ("0-2", "nvidia.com/gpu=0,1", "GPU-8EF4")
    },
    "variable without a value": env(DEVICES),
    "variable twice": env(f"{DEVICES}=all", f"{DEVICES}=1"),
    "variable, and void at its end": env(f"{DEVICES}=1", f"{DEVICES}=void"),
    "no variable": env(),
    "other variables": env("PATH=/bin", f"{CAPABLE}=nonsense"),
    "legacy image": env("CUDA_VERSION=8.0"),
    "legacy image that requires a CUDA": env("CUDA_VERSION=8.0", "NVIDIA_REQUIRE_CUDA=cuda>=8.0"),
    "legacy image that requires nothing": env("CUDA_VERSION=8.0", "NVIDIA_REQUIRE_CUDA="),
    "legacy image without a version": env("CUDA_VERSION="),
    "legacy image, void": env("CUDA_VERSION=8.0", f"{DEVICES}=void"),
    "legacy image, none": env("CUDA_VERSION=8.0", f"{DEVICES}=none"),
    **{
        f"legacy image of CUDA {version!r}": env(f"CUDA_VERSION={version}", f"{DEVICES}=0")
        for version in ("10.1.243", " 8.0 ", "latest", "10", "9.x", "²·1", "10.")
    },
    "modern image with a version": env(
        "CUDA_VERSION=9.0", "NVIDIA_REQUIRE_CUDA=cuda>=9.0", f"{DEVICES}=0"
    ),
    **{
        f"capabilities {value!r}": env(f"{DEVICES}=0", f"{CAPABLE}={value}")
        for value in (
            "", " , ", "all", "utility,all", "video", "compat32, ngx ,display", "graphics,graphics",
            "utility,Compute",
        )
    },
    "capabilities of a legacy image": env("CUDA_VERSION=8.0", f"{CAPABLE}="),
    **{
        f"mounts {', '.join(names)}": Case(mounts=names)
        for names in (
            ("0", "1"), ("all",), ("void",), ("cdi/nvidia.com/gpu/1",),
            ("cdi/nvidia.com/gpu=1", "0"), (f"MIG-GPU-{UUID}/1/0",), ("x/y",), ("imex/x",),
        )
    },
    # A device plugin that mounts the names sets the variable to their directory.
    "mounts, and a variable of them": env(f"{DEVICES}={BELOW}", mounts=("2",)),
    "mounts, and a variable": env(f"{DEVICES}=all", mounts=("2",)),
    "mount at a path of another form": Case(
        more=(null("/var//run/./nvidia-container-devices/3/"),)
    ),
    "mounts that are no names": Case(
        more=(
            null(BELOW), null(f"{BELOW}/0", "/dev/zero"), null(f"{BELOW}2/0"),
            null(f"{BELOW}/../0"), null(1), {},
        )
    ),
    "mounts with channels": env("NVIDIA_IMEX_CHANNELS=7", mounts=("0", "imex/2", "imex/channel1")),
    "mounts with channels of a variable": env("NVIDIA_IMEX_CHANNELS=7", mounts=("0",)),
    "annotation": cdi(names="nvidia.com/gpu=0"),
    "annotation, mounts and a variable": cdi(
        f"{DEVICES}=all", names="nvidia.com/gpu=0", mounts=("2",)
    ),
    # containerd has applied the annotation's CDI devices, and recorded that.
    "annotation, and void": cdi(f"{DEVICES}=void", names="nvidia.com/gpu=0"),
    "annotation of another vendor alone, for which NVIDIA ignores the variable": cdi(
        f"{DEVICES}=GPU-{UUID}", names=NIC
    ),
    "annotation of another vendor, and another in the variable": cdi(
        f"{DEVICES}=0,amd.com/gpu=all", names=NIC
    ),
    "annotation of channels": cdi(
        f"{DEVICES}=0", names="k8s.device-plugin.nvidia.com/imex-channel=0"
    ),
    "annotations by name": Case(
        annotations={
            "cdi.k8s.io/b": "nvidia.com/gpu=1,amd.com/gpu=0", "cdi.k8s.io/a": "nvidia.com/gpu=0",
            "other.io/a": "not a device",
        }
    ),
    "annotation that names nothing": cdi(names="x/y"),
    # The default kind does not apply to them, and the kind of one does not carry over to the next.
    **{
        f"annotation {value!r}, {config.default_kind}, {' '.join(variables) or 'alone'}": cdi(
            *variables, names=value, config=config
        )
        for value in NO_CDI_NAMES
        for config in (Config(), OF_AMD)
        for variables in ((), (f"{DEVICES}=nvidia.com/gpu=2",))
    },
    **{
        f"annotation {value!r} after another": Case(
            annotations={
                "cdi.k8s.io/a": "nvidia.com/gpu=0", "cdi.k8s.io/b": f"{value},nvidia.com/gpu=3",
            },
        )
        for value in NO_CDI_NAMES
    },
    # A container with a GPU from CDI gets no other one through its image.
    **{f"annotation {name}": cdi(f"{DEVICES}=all", names=name) for name in GIVEN_BY_CDI},
    **{f"mount {name}": env(f"{DEVICES}=all", mounts=(f"cdi/{name}",)) for name in GIVEN_BY_CDI},
    "other vendor's kind": env(f"{DEVICES}=amd.com/gpu=0"),
    **{
        f"AMD and Intel {value!r}": env(
            f"AMD_VISIBLE_DEVICES={value}", f"INTEL_VISIBLE_DEVICES={value}"
        )
        for value in ("0", " all ", "", "void", "none", "0,void", ",")
    },
    "Docker's hook": env(f"{DEVICES}=1", hooks={"prestart": [hook()]}),
    "Docker's hook at another stage": env(f"{DEVICES}=1", hooks={"createRuntime": [hook()]}),
    **{
        f"hook at {stage}, and {' '.join(variables) or 'nothing'}": env(
            *variables, hooks={stage: [hook()], "poststart": None}
        )
        for stage in ("prestart", "createRuntime")
        for variables in ((), (f"{DEVICES}=void",))
    },
    "swarm": env(*SWARMED, config=SWARM),
    "swarm that is not configured": env(*SWARMED),
    "swarm of nothing": env("DOCKER_RESOURCE_GPU=", f"{DEVICES}=all", config=SWARM),
    # The image's variable is not the request of Docker's --gpus.
    "swarm and Docker's hook": env(*SWARMED, config=SWARM, hooks={"prestart": [hook()]}),
    "prefix of annotations": Case(
        annotations={"example.com/gpu_a": "nvidia.com/gpu=0", CDI: "nvidia.com/gpu=1"},
        config=PLACED,
    ),
    "mounts that are not accepted": Case(mounts=("0",), config=PLACED),
    "default kind": env(f"{DEVICES}=0", config=OF_AMD),
    "everything by variables": env(f"{DEVICES}=0", *EVERYTHING),
    "everything by variables, with mounts": env(*EVERYTHING, mounts=("0",)),
    "everything by variables, with an annotation": cdi(*EVERYTHING, names="nvidia.com/gpu=0"),
    "variables that ask for nothing by themselves": env(*NONSENSE),
    "variables beside mounts": env(*BY_VARIABLES, mounts=("0",)),
    "variables that mounts name, too": env(
        *BY_VARIABLES, mounts=("0", "imex/0", "cdi/nvidia.com/nvswitch/all")
    ),
    **{
        f"MIG configuration {value!r}": env(f"{DEVICES}=0", f"NVIDIA_MIG_CONFIG_DEVICES={value}")
        for value in ("", "void", "none")
    },
    "MIG monitoring of one": env(f"{DEVICES}=0", "NVIDIA_MIG_MONITOR_DEVICES=0"),
    **{
        f"requirements, disabled {value!r}": env(
            f"{DEVICES}=0", "NVIDIA_REQUIRE_CUDA=cuda>=99", f"NVIDIA_DISABLE_REQUIRE={value}"
        )
        for value in (
            "1", "t", "T", "true", "TRUE", "True", "", "0", "false", "yes", "tRUE",
        )
    },
    **{
        f"prestart hook {entry!r}": env(hooks={"prestart": [entry]})
        for entry in (
            hook("/usr/local/nvidia/toolkit/nvidia-container-toolkit"),
            hook("nvidia-container-toolkit"),
            hook("/x/nvidia-container-toolkit", "-config", "/c.toml", "prestart"),
            hook("/x/nvidia-container-toolkit", "poststop"),
            hook("/x/my-nvidia-container-toolkit"),
            hook("/x/nvidia-container-toolkit/hook"),
            {"path": "/x/nvidia-container-toolkit"},
            {"path": "/x/nvidia-container-toolkit", "args": ["prestart"]},
            {"path": 1, "args": []},
            {"path": "/x/nvidia-container-toolkit", "args": "prestart"},
            "nvidia-container-toolkit",
        )
    },
    **{
        f"spec {spec!r}": Case(spec=spec)
        for spec in (
            {}, [], {"process": None}, {"process": []}, {"process": {}}, {"process": {"env": None}},
            {"process": {"env": "A=1"}}, {"process": {"env": [1]}},
            *({"process": {}, **part} for part in MISSHAPEN),
        )
    },
}  # fmt: skip
NOTHING = Request(Void())


def shown(request: Request) -> dict[str, Any]:
    """Return the fields in which a request differs from an empty one, in readable form."""
    found: dict[str, Any] = {}
    for each in fields(Request):
        value = getattr(request, each.name)
        if value != getattr(NOTHING, each.name):
            found[each.name] = sorted(value) if isinstance(value, frozenset) else value
    if isinstance(request.devices, NamedDevices):
        found["devices"] = ",".join(map(str, request.devices.devices))
    elif isinstance(request.devices, AllDevices | NoDevices):
        found["devices"] = type(request.devices).__name__
    if request.capabilities == CAPABILITIES:
        found["capabilities"] = "all"
    if request.wants_injection:
        found["wants"] = "driver" if request.wants_driver else "injection"
    found_as_json: dict[str, Any] = json.loads(json.dumps(found))
    return found_as_json


@pytest.mark.parametrize("name", CASES)
def test_spec_makes_the_request(name: str) -> None:
    case = CASES[name]
    config = case.config or Config()
    spec = case.made()
    requests = find_work(spec, Settings(config)).requests
    try:
        request = read_request(spec, config)
    except NvshimError as error:
        assert requests
        GOLDEN.compare(name, {"error": str(error)})
        return
    assert requests == request.wants_injection
    GOLDEN.compare(name, shown(request))


def test_devices_that_the_spec_has_already_are_a_request_of_these() -> None:
    spec = env(f"{DEVICES}=all", f"{CAPABLE}=video").made()
    assert read_more(spec, ["0", "2"]) == Request(
        NamedDevices((GpuIndex(0), GpuIndex(2))),
        frozenset({"video"}),
        origin=Origin.SPEC,
        source="nodes that the spec lists, NVIDIA_DRIVER_CAPABILITIES=video",
    )
    assert read_more(env().made(), ["0"]) == Request(
        NamedDevices((GpuIndex(0),)),
        DEFAULT_CAPABILITIES,
        origin=Origin.SPEC,
        source="nodes that the spec lists, NVIDIA_DRIVER_CAPABILITIES=",
    )


KEYS = st.sampled_from(["process", "env", "x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_json_for_a_spec_gives_a_request_or_a_typed_error(spec: Any) -> None:
    try:
        read_request(spec)
    except NvshimError as error:
        kinds = (MalformedSpec, MalformedDevice, UnknownCapability)
        assert any(is_error(error, kind) for kind in kinds)  # noqa: PT017 - either is right
