"""The labels of a node."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from hooks.node.driver import Driver
from hooks.node.gpus import Gpu, MigDevice
from hooks.words import Arch
from integration.node.services.labels.decision import NodeLabels, labels_of
from integration.node.services.labels.host import HostFacts
from integration.node.services.labels.names import is_label
from integration.node.values.resources import (
    MPS,
    TIME_SLICING,
    Mig,
    Settings,
    SharedResource,
    Sharing,
)
from integration.nvml.mig_parts import GpuParts, Parts, Profile
from tests.unit.node.inventories import node_with

H100: Final = "NVIDIA H100 80GB HBM3"
A30: Final = "NVIDIA A30"
T4: Final = "Tesla T4"
MIXED: Final = Settings(mig_strategy=Mig.MIXED)
SINGLE: Final = Settings(mig_strategy=Mig.SINGLE)
NAME: Final = re.compile(r"nvidia\.com/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def gpu(index: int, model: str = H100, **more: Any) -> Gpu:
    known = {"memory": 85520809984, "compute_capability": "9.0", **more}
    known.setdefault("architecture", "Hopper" if known["compute_capability"] else "")
    return Gpu(index, index, f"GPU-{index}", f"0000:{index:02x}:00.0", model, **known)


def part(of: int, index: int, profile: str = "1g.10gb") -> MigDevice:
    return MigDevice(of, index, f"MIG-{of}-{index}", index, 0, profile)


def shared(replicas: int, resource: str = "gpu", kind: str = TIME_SLICING, **more: Any) -> Settings:
    names = {"rename", "devices", "count"} & more.keys()
    rule = SharedResource(f"nvidia.com/{resource}", replicas, **{n: more.pop(n) for n in names})
    return Settings(mig_strategy=Mig.MIXED, sharing=Sharing(kind, resources=(rule,), **more))


CAPABLE: Final = Parts({"GPU-0": GpuParts((Profile(19, "1g.10gb", 7, (), ()),))})


def found(
    *gpus: Gpu, mig: tuple[MigDevice, ...] = (), settings: Settings = MIXED, **more: Any
) -> NodeLabels:
    facts = more.pop("facts", Parts())
    host = more.pop("host", HostFacts())
    labels = labels_of(node_with(*gpus, mig=mig, **more), settings, facts, host)
    for name, value in labels.labels.items():
        assert is_label(name), name
        assert NAME.fullmatch(name), name
        assert VALUE.fullmatch(value), (name, value)
    return labels


def of(*gpus: Gpu, prefix: str = "gpu", **more: Any) -> dict[str, str]:
    """Return the labels with a prefix, without that prefix."""
    labels = found(*gpus, **more).labels
    start = f"nvidia.com/{prefix}."
    return {n.removeprefix(start): v for n, v in labels.items() if n.startswith(start)}


def test_a_node_has_what_gpu_feature_discovery_gives_it() -> None:
    """The labels are those of GFD 0.20 for two H100 on a simulated node."""
    driver = Driver("535.104.05", Arch.X86_64, (), (), ())
    host = HostFacts(
        "PowerEdge XE9680", {f"0000:0{n}:00.0": "0x030200" for n in range(2)}, vgpu=False
    )
    labels = found(
        gpu(0), gpu(1), driver=driver, cuda_version="12.2", host=host,
        facts=CAPABLE,
    )  # fmt: skip
    assert labels.note == ""
    assert {name.removeprefix("nvidia.com/"): value for name, value in labels.labels.items()} == {
        "cuda.driver-version.full": "535.104.05", "cuda.driver-version.major": "535",
        "cuda.driver-version.minor": "104", "cuda.driver-version.revision": "05",
        "cuda.driver.major": "535", "cuda.driver.minor": "104", "cuda.driver.rev": "05",
        "cuda.runtime-version.full": "12.2", "cuda.runtime-version.major": "12",
        "cuda.runtime-version.minor": "2", "cuda.runtime.major": "12", "cuda.runtime.minor": "2",
        "gpu.compute.major": "9", "gpu.compute.minor": "0", "gpu.count": "2",
        "gpu.family": "hopper", "gpu.machine": "PowerEdge-XE9680", "gpu.memory": "81559",
        "gpu.mode": "compute", "gpu.present": "true", "gpu.product": "NVIDIA-H100-80GB-HBM3",
        "gpu.replicas": "1", "gpu.sharing-strategy": "none", "mig.capable": "true",
        "mig.strategy": "mixed", "mps.capable": "false", "vgpu.present": "false",
    }  # fmt: skip


def test_what_cannot_be_known_is_left_out() -> None:
    driver = Driver("535", Arch.X86_64, (), (), ())
    labels = found(
        gpu(0, memory=None, compute_capability=""), driver=driver, settings=Settings()
    ).labels
    assert sorted(name.removeprefix("nvidia.com/") for name in labels) == [
        "gpu.count", "gpu.present", "gpu.product", "gpu.replicas", "gpu.sharing-strategy",
        "mig.capable", "mps.capable",
    ]  # fmt: skip
    assert "product" not in of(gpu(0, model="()"))


def test_a_driver_without_a_revision_has_an_empty_one() -> None:
    labels = found(gpu(0), driver=Driver("535.104", Arch.X86_64, (), (), ())).labels
    assert labels["nvidia.com/cuda.driver-version.revision"] == ""


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("Ada Lovelace", "ada-lovelace"), ("Hopper", "hopper"), ("Rubin", "rubin"), ("", None)],
)
def test_the_family_is_what_nvml_names(architecture: str, family: str | None) -> None:
    # Its compute capability alone would make it a Blackwell.
    labels = of(gpu(0, compute_capability="10.7", architecture=architecture))
    assert labels.get("family") == family


@pytest.mark.parametrize(
    ("classes", "mode"),
    [
        (("0x030200", "0x030200"), "compute"), (("0x030000", "0x030000"), "graphics"),
        (("0x030000", "0x030200"), "unknown"), (("0x038000", "0x038000"), "unknown"),
        (("0x030200",), None),
    ],
)  # fmt: skip
def test_the_mode_is_that_of_all_gpus(classes: tuple[str, ...], mode: str | None) -> None:
    host = HostFacts(classes={f"0000:{n:02x}:00.0": each for n, each in enumerate(classes)})
    assert of(gpu(0), gpu(1), host=host).get("mode") == mode


def test_a_clique_is_what_the_caller_says() -> None:
    labels = labels_of(node_with(gpu(0)), MIXED, Parts(), HostFacts(), "a.1").labels
    assert labels["nvidia.com/gpu.clique"] == "a.1"
    assert "clique" not in of(gpu(0))


def test_a_node_without_gpus_has_no_labels() -> None:
    display = gpu(0, "NVIDIA DGX Display")
    assert found(display, gpu(1, excluded=True)) == NodeLabels()
    assert of(display, gpu(1))["count"] == "1"


# -- values ------------------------------------------------------------------------------------


def test_a_value_has_at_most_63_characters_and_a_product_keeps_its_end() -> None:
    long = "NVIDIA (R) RTX PRO 6000/Blackwell  Max-Q Workstation Edition"
    assert of(gpu(0, long))["product"] == "NVIDIA-R-RTX-PRO-6000Blackwell-Max-Q-Workstation-Edition"
    machine = HostFacts("-x " * 40)
    assert of(gpu(0), host=machine)["machine"] == f"x{'--x' * 20}"
    node = (gpu(0, long, mig=True),)
    told = of(
        *node, mig=(part(0, 0, "1g.24gb+me.all"),), prefix="mig-1g.24gb.me.all",
        settings=shared(2, "mig-1g.24gb.me.all"),
    )  # fmt: skip
    end = "-MIG-1g.24gb.me.all-SHARED"
    assert told["product"] == f"NVIDIA-R-RTX-PRO-6000Blackwell-Max-Q{end}"


# -- MIG ---------------------------------------------------------------------------------------

FIGURES: Final = {f"MIG-{of}-{n}": (9984, 16, 1, 1, 0, 1, 0) for of in range(2) for n in range(7)}
FACTS: Final = Parts(CAPABLE.gpus, figures=FIGURES)
CUT: Final = tuple(part(of, index) for of in range(2) for index in range(7))
TWO: Final = gpu(0, mig=True), gpu(1, mig=True)
OF_MIG: Final = {
    "count": "14", "replicas": "1", "sharing-strategy": "none", "memory": "9984",
    "multiprocessors": "16", "engines.copy": "1", "engines.decoder": "1", "engines.encoder": "0",
    "engines.jpeg": "1", "engines.ofa": "0", "slices.gi": "1", "slices.ci": "1",
    "product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
}  # fmt: skip


def test_mixed_has_labels_for_each_profile() -> None:
    mig = (*CUT[:7], part(1, 9, "3g.40gb"), part(1, 1, "1c.3g.40gb"), part(1, 2, ""))
    labels: dict[str, Any] = {"mig": mig, "facts": FACTS}
    assert of(*TWO, prefix="mig-1g.10gb", **labels) == OF_MIG | {"count": "7"}
    assert of(*TWO, prefix="mig-1c.3g.40gb", **labels)["slices.ci"] == "1"
    assert of(*TWO, prefix="mig-1c.3g.40gb", **labels)["slices.gi"] == "3"
    assert "memory" not in of(*TWO, prefix="mig-3g.40gb", **labels), "NVML did not say"
    whole = of(*TWO, **labels)
    assert (whole["count"], whole["replicas"]) == ("2", "0")
    assert of(*TWO, gpu(2), **labels)["replicas"] == "1"


@pytest.mark.parametrize("profile", ["1g 10gb", "1g/10gb", "é", "1g.10gb+", "-", "x" * 128])
@pytest.mark.parametrize("settings", [MIXED, SINGLE], ids=["mixed", "single"])
def test_a_profile_that_no_label_can_have_costs_no_other_label(
    profile: str, settings: Settings
) -> None:
    mig = (part(0, 0, profile), part(0, 1), part(1, 0, profile))
    labels = found(*TWO, mig=mig[:2] if settings is MIXED else mig[::2], settings=settings).labels
    prefix = "mig-1g.10gb" if settings is MIXED else "gpu"
    assert f"nvidia.com/{prefix}.count" in labels
    assert "nvidia.com/gpu.present" in labels


def test_single_labels_mig_devices_as_gpus() -> None:
    labels = of(*TWO, mig=CUT, facts=FACTS, settings=SINGLE)
    more = {"present": "true", "family": "hopper", "compute.major": "9", "compute.minor": "0"}
    assert labels == OF_MIG | more
    assert found(*TWO, mig=CUT, settings=SINGLE).labels["nvidia.com/mig.strategy"] == "single"
    assert of(gpu(0), settings=SINGLE)["product"] == "NVIDIA-H100-80GB-HBM3"


@pytest.mark.parametrize(
    ("gpus", "mig"),
    [
        ((gpu(0, mig=True), gpu(1)), CUT[:7]),
        (TWO, CUT[:7]),
        (TWO, (*CUT[:8], part(1, 1, "3g.40gb"))),
        (TWO, ()),
        (TWO, (part(0, 0, ""), part(1, 0, ""))),
    ],
    ids=["a GPU without", "one is empty", "two profiles", "all are empty", "unknown profiles"],
)
def test_single_says_what_it_cannot_be(gpus: tuple[Gpu, ...], mig: tuple[MigDevice, ...]) -> None:
    labels = of(*gpus, mig=mig, facts=FACTS, settings=SINGLE)
    told = {name: labels[name] for name in ("product", "count", "replicas", "memory")}
    product = "NVIDIA-H100-80GB-HBM3-MIG-INVALID"
    assert told == {"product": product, "count": "0", "replicas": "0", "memory": "0"}
    assert labels["sharing-strategy"] == ""


def test_a_lost_gpu_does_not_make_a_layout_invalid() -> None:
    lost = gpu(1, lost="it is lost", memory=None, compute_capability="")
    labels = of(TWO[0], lost, mig=CUT[:7], facts=FACTS, settings=SINGLE)
    assert (labels["product"], labels["count"]) == (OF_MIG["product"], "7")
    assert of(lost, gpu(0))["memory"] == "81559", "the value of a GPU that answers"
    assert of(lost, gpu(0))["count"] == "2"


def test_none_labels_whole_gpus_only() -> None:
    labels = found(*TWO, mig=CUT, facts=FACTS, settings=Settings()).labels
    assert not [name for name in labels if "mig-" in name or name.endswith("strategy.mig")]
    assert labels["nvidia.com/gpu.replicas"] == "0"
    assert "nvidia.com/mig.strategy" not in labels


# -- several models ----------------------------------------------------------------------------


def test_of_several_models_that_of_most_whole_gpus_is_labelled_and_the_others_are_noted() -> None:
    both = (gpu(0, T4), gpu(1, H100), gpu(2, T4))
    labels = found(*both)
    assert labels.labels["nvidia.com/gpu.product"] == "Tesla-T4"
    assert labels.labels["nvidia.com/gpu.count"] == "2"
    assert labels.note == (
        "nvidia.com/gpu.* describes 2 of 3 GPUs, Tesla T4; the node also has: "
        "NVIDIA H100 80GB HBM3 (1)"
    )
    assert found(*reversed(both)) == labels
    cut = (gpu(0, mig=True), gpu(1, mig=True), gpu(2, A30))
    assert of(*cut)["product"] == "NVIDIA-A30", "the others are no resource nvidia.com/gpu"
    assert of(gpu(0, T4), gpu(1, A30))["product"] == "NVIDIA-A30"


def test_of_several_models_with_one_profile_that_of_most_devices_is_labelled() -> None:
    both = (gpu(0, A30, mig=True), gpu(1, mig=True))
    mig = (part(0, 0), part(1, 0), part(1, 1))
    labels = of(*both, mig=mig, prefix="mig-1g.10gb")
    assert (labels["product"], labels["count"]) == (OF_MIG["product"], "2")


def test_single_describes_devices_of_the_model_that_is_labelled() -> None:
    gpus = (gpu(0, A30, mig=True), gpu(1, A30, mig=True), gpu(2, mig=True))
    mig = (part(0, 0), part(1, 0), part(2, 0), part(2, 1), part(2, 2))
    labels = of(*gpus, mig=mig, settings=SINGLE)
    assert (labels["product"], labels["count"]) == ("NVIDIA-A30-MIG-1g.10gb", "2")


# -- sharing -----------------------------------------------------------------------------------


def test_what_is_shared_says_so() -> None:
    labels = of(gpu(0), gpu(1), settings=shared(4))
    told = labels["product"], labels["count"], labels["replicas"], labels["sharing-strategy"]
    assert told == ("NVIDIA-H100-80GB-HBM3-SHARED", "2", "4", "time-slicing")
    parts = of(*TWO, mig=CUT, settings=shared(3, "mig-1g.10gb"), prefix="mig-1g.10gb")
    assert (parts["product"], parts["replicas"]) == (f"{OF_MIG['product']}-SHARED", "3")
    assert of(*TWO, mig=CUT, settings=shared(3))["replicas"] == "0"


@pytest.mark.parametrize(
    ("more", "suffix"),
    [
        ({"rename_by_default": True}, ""), ({"rename": "nvidia.com/gpu.part"}, ""),
        ({"count": 1}, ""), ({"devices": ("0",)}, ""), ({"count": 2}, "-SHARED"),
    ],
)  # fmt: skip
def test_a_product_is_shared_where_the_resource_keeps_its_name(
    more: dict[str, Any], suffix: str
) -> None:
    labels = of(gpu(0), gpu(1), settings=shared(4, **more))
    assert labels["product"] == f"NVIDIA-H100-80GB-HBM3{suffix}"
    assert labels["replicas"] == "4"


@pytest.mark.parametrize(
    ("more", "other", "expected"),
    [
        ({"devices": ("*A30*",)}, gpu(2, A30), ("", "1", "none")),
        ({"devices": ("2",)}, gpu(2, A30), ("", "1", "none")),
        ({"devices": ("*H100*",)}, gpu(2, A30), ("", "4", TIME_SLICING)),
        ({"devices": ("*",)}, gpu(2, A30), ("-SHARED", "4", TIME_SLICING)),
        ({"count": 2}, gpu(2, A30), ("", "4", TIME_SLICING)),
        ({"count": 2}, gpu(2, mig=True), ("-SHARED", "4", TIME_SLICING)),
    ],
)
def test_what_is_shared_is_what_the_resource_has_of_the_model(
    more: dict[str, Any], other: Gpu, expected: tuple[str, str, str]
) -> None:
    labels = of(gpu(0), gpu(1), other, settings=shared(4, **more))
    told = labels["product"], labels["replicas"], labels["sharing-strategy"]
    assert told == (f"NVIDIA-H100-80GB-HBM3{expected[0]}", *expected[1:])


def test_mig_devices_are_shared_by_their_names() -> None:
    def told(*names: str) -> tuple[str, str]:
        settings = shared(3, "mig-1g.10gb", devices=names)
        labels = of(*TWO, mig=CUT[:2], settings=settings, prefix="mig-1g.10gb")
        return labels["product"].removeprefix(OF_MIG["product"]), labels["replicas"]

    assert told("MIG-0-0", "0:1") == told("MIG-GPU-0/0/0", "0:1") == ("-SHARED", "3")
    assert told("0:1") == ("", "3")
    assert told("1:1") == ("", "1")


def test_mps_is_possible_where_it_shares_something() -> None:
    def capable(settings: Settings) -> str:
        return found(gpu(0), settings=settings).labels["nvidia.com/mps.capable"]

    assert capable(shared(4, kind=MPS)) == "true"
    assert capable(shared(1, kind=MPS)) == capable(shared(4)) == "false"


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "nvidia.com/mig.config", "nvidia.com/mig.config.state", "nvidia.com/gpu.deploy.driver",
        "nvidia.com/gfd.timestamp", "nvidia.com/device-plugin.config", "example.com/gpu.count",
        "nvidia.com/gpu.countless", "nvidia.com/gpu-driver-upgrade-state",
    ],
)  # fmt: skip
def test_labels_of_others_are_not_ours(name: str) -> None:
    assert not is_label(name)
