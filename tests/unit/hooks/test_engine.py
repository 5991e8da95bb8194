from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.errors import NvshimError
from hooks import contributions, engine
from hooks.edits.mutation import apply
from hooks.errors import (
    DeviceConflict,
    DriverNotFound,
    MalformedSpec,
    RequirementUnmet,
    UnknownDevice,
    VerificationFailed,
)
from hooks.image.layout import unseen_layout
from hooks.image.rootfs import Rootfs
from hooks.plan import Mount, Plan
from tests.harness.raising import Kind, raises
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Elves, Node, nvml_gpu

HOME = MULTIARCH


@pytest.fixture
def read_only(rootfs: Path) -> Iterator[Path]:
    subprocess.run(["mount", "--bind", "-o", "ro", str(rootfs), str(rootfs)], check=True)
    yield rootfs
    subprocess.run(["umount", str(rootfs)], check=True)


def spec_with(*environment: str) -> dict[str, Any]:
    return {
        "ociVersion": "1.0.2",
        "process": {
            "args": ["true"],
            "env": ["PATH=/bin", *environment],
            "user": {"uid": 0, "gid": 0},
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
        ],
        "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}},
    }


def injected(
    node: Node, rootfs: Path, spec: dict[str, Any], *more: dict[str, Any]
) -> engine.Injection:
    request = engine.read_request(spec)
    inventory = engine.load_inventory(node.config)
    if inventory is None:
        inventory = node.take_inventory(nvml_gpu(0), nvml_gpu(1), *more)
    before = copy.deepcopy(spec)
    try:
        return engine.inject(
            spec,
            request,
            inventory,
            engine.RootfsTarget(str(rootfs), str(node.base / "staging")),
            config=node.config,
        )
    finally:
        assert spec == before


def tree(directory: Path) -> dict[str, tuple[int, Any]]:
    seen = {}
    for path in sorted(directory.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        seen[str(path)] = (path.lstat().st_mode, content)
    return seen


def test_glibcs_ldconfig_reads_the_same_libraries(node: Node, rootfs: Path) -> None:
    injected(node, rootfs, spec_with("NVIDIA_VISIBLE_DEVICES=all"))
    command = ["ldconfig", "-p", "-C", str(rootfs / "etc/ld.so.cache")]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"):
        assert f"\t{name} (libc6,x86-64) => /{HOME}/" in listed


def test_container_that_asks_for_nothing_is_left_alone(node: Node, rootfs: Path) -> None:
    before = tree(rootfs)
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=void")
    assert injected(node, rootfs, spec) == engine.Injection(spec, {})
    assert tree(rootfs) == before


OF_A_POD = {"io.kubernetes.cri.container-type": "container"}


def test_denied_container_is_left_alone_and_its_record_says_why(
    bare_node: Node, rootfs: Path
) -> None:
    before = tree(rootfs)
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=all") | {"annotations": OF_A_POD}
    verdict = engine.judge(spec, engine.read_request(spec), bare_node.config)
    # This node has no driver, and the engine does not search for one.
    assert not engine.needs_inventory(verdict.allowed, bare_node.config)
    done = engine.inject(
        spec, verdict.allowed, None,
        engine.RootfsTarget(str(rootfs), str(bare_node.base / "staging")),
        config=bare_node.config, verdict=verdict,
    )  # fmt: skip
    assert done.spec == spec
    assert tree(rootfs) == before
    assert done.record["request"]["devices"] == "all"
    assert done.record["policy"]["denied"] == list(verdict.denials) != []
    assert json.loads(json.dumps(done.record)) == done.record
    assert engine.apply_to_process({"args": ["x"]}, done.record)["args"] == ["x"]


def test_hook_of_nvidias_goes_from_a_denied_container_too(bare_node: Node, rootfs: Path) -> None:
    hook = {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]}
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=all")
    spec |= {"annotations": OF_A_POD, "hooks": {"prestart": [hook]}}
    verdict = engine.judge(spec, engine.read_request(spec), bare_node.config)
    assert verdict.denials
    done = engine.inject(
        spec, verdict.allowed, None,
        engine.RootfsTarget(str(rootfs), str(bare_node.base / "staging")),
        config=bare_node.config, verdict=verdict,
    )  # fmt: skip
    assert done.spec == spec | {"hooks": {"prestart": []}}
    assert done.record["policy"]["denied"]
    assert done.record["edits"]["devices"] == done.record["edits"]["mounts"] == []


def test_requirement_is_checked_unless_the_operator_says_no(node: Node, rootfs: Path) -> None:
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_REQUIRE_CUDA=cuda>=99")
    before = tree(rootfs)
    with raises(RequirementUnmet):
        injected(node, rootfs, spec)
    assert tree(rootfs) == before
    node.config = replace(node.config, disable_require=True)
    assert injected(node, rootfs, spec).record["grant"]["gpus"]


def test_second_injection_changes_nothing(node: Node, rootfs: Path) -> None:
    first = injected(node, rootfs, spec_with("NVIDIA_VISIBLE_DEVICES=all"))
    before = tree(rootfs)
    assert injected(node, rootfs, first.spec).spec == first.spec
    assert tree(rootfs) == before


def test_record_tells_request_grant_edits_and_what_is_missing(node: Node, rootfs: Path) -> None:
    record = injected(node, rootfs, spec_with("NVIDIA_VISIBLE_DEVICES=0")).record
    assert json.loads(json.dumps(record)) == record
    assert record["request"]["devices"] == ["0"]
    assert record["request"]["source"] == "NVIDIA_VISIBLE_DEVICES=0"
    assert [gpu["index"] for gpu in record["grant"]["gpus"]] == [0]
    assert record["node"]["driver"] == VERSION
    assert record["image"]["loaders"][0]["directory"] == f"/{HOME}"
    assert {d["reason"].split()[0] for d in record["edits"]["devices"]} == {"control", "GPU"}
    assert "nvidia-smi" in {missing["what"] for missing in record["missing"]}
    assert f"/{HOME}/libcuda.so.1" in record["written"]
    steps = {"grant", "layout", "plan", "check", "place", "apply", "char links"}
    assert set(record["milliseconds"]) == steps


def test_exec_gets_what_init_got(node: Node, rootfs: Path) -> None:
    node.add_gpu(2, "0000:00:01.0", drm=True)
    environment = ("NVIDIA_VISIBLE_DEVICES=2", "NVIDIA_DRIVER_CAPABILITIES=all")
    done = injected(node, rootfs, spec_with(*environment), nvml_gpu(2, "0000:00:01.0"))
    process = {"args": ["sh"], "env": ["PATH=/bin"], "user": {"uid": 5, "gid": 5}, "cwd": "/"}
    edited = engine.apply_to_process(process, json.loads(json.dumps(done.record)))
    assert f"NVIDIA_CTK_LIBCUDA_DIR=/{HOME}" in edited["env"]
    assert f"NVIDIA_CTK_LIBCUDA_DIR=/{HOME}" in done.spec["process"]["env"]
    assert edited["user"] == {"uid": 5, "gid": 5, "additionalGids": [44]}
    assert done.spec["process"]["user"]["additionalGids"] == [44]
    assert {name: edited[name] for name in ("args", "cwd")} == {"args": ["sh"], "cwd": "/"}


@pytest.mark.parametrize("record", [{}, {"process": 3}, {"process": {"environment": [1]}}])
def test_exec_with_a_damaged_record_is_a_typed_error(record: dict[str, Any]) -> None:
    with raises(MalformedSpec):
        engine.apply_to_process({}, record)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s: s["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=9"), UnknownDevice),
        (lambda s: s.update(mounts="none"), MalformedSpec),
        (lambda s: s["mounts"].append(3), MalformedSpec),
        (lambda s: s["mounts"].append({"source": "/x"}), MalformedSpec),
        (lambda s: s["linux"].update(devices=3), MalformedSpec),
        (
            lambda s: s["linux"].update(
                devices=[{"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3}]
            ),
            DeviceConflict,
        ),
    ],
)
def test_what_fails_leaves_nothing_behind(
    node: Node, rootfs: Path, change: Any, error: Kind[NvshimError]
) -> None:
    before = tree(rootfs)
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=0")
    change(spec)
    with raises(error):
        injected(node, rootfs, spec)
    assert tree(rootfs) == before
    assert not (node.base / "staging").exists()


def test_file_of_the_host_that_is_no_drivers_does_not_verify(
    node: Node, rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*given: Any) -> Plan:
        # Below the driver's root, like all files if that is the host's root.
        return Plan(mounts=(Mount(f"{node.config.driver_root}/etc/shadow", "/etc/shadow"),))

    monkeypatch.setattr(contributions, "make_plan", greedy)
    with raises(VerificationFailed, match="source elsewhere"):
        injected(node, rootfs, spec_with("NVIDIA_VISIBLE_DEVICES=0"))


def test_edit_of_the_spec_in_place_does_not_verify(
    node: Node, rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=0")

    def careless(spec: Any, *edits: Any) -> Any:
        spec["process"]["args"] = ["/evil"]
        return apply(spec, *edits)

    monkeypatch.setattr(contributions, "apply", careless)
    inventory = engine.take_inventory(node.config, b"")
    with raises(VerificationFailed):
        engine.inject(
            spec,
            engine.read_request(spec),
            inventory,
            engine.RootfsTarget(str(rootfs), str(node.base / "staging")),
            config=node.config,
        )


def test_missing_rootfs_is_a_typed_error(node: Node) -> None:
    with pytest.raises(NvshimError, match="NVSHIM-E03"):
        injected(node, node.base / "nowhere", spec_with("NVIDIA_VISIBLE_DEVICES=0"))


@pytest.mark.parametrize("linked", [MULTIARCH, "usr/local/cuda/compat"])
def test_directory_of_the_image_that_no_spec_can_name_gets_nothing(
    node: Node, rootfs: Path, elves: Elves, linked: str
) -> None:
    elves.write(rootfs / "usr/local/cuda/compat/libcuda.so.999.1", "libcuda.so.1")
    there = rootfs / os.fsdecode(b"opt/\xff")
    there.parent.mkdir()
    (rootfs / linked).rename(there)
    (rootfs / linked).symlink_to(Path("/") / there.relative_to(rootfs))
    done = injected(node, rootfs, spec_with("NVIDIA_VISIBLE_DEVICES=0"))
    json.dumps(done.spec, ensure_ascii=False).encode()
    assert (rootfs / "etc/ld.so.cache").exists()


def test_read_only_rootfs_gets_everything_from_staging(node: Node, read_only: Path) -> None:
    before = tree(read_only)
    environment = ("NVIDIA_VISIBLE_DEVICES=0", "LD_LIBRARY_PATH=/old", "LD_LIBRARY_PATH=/mine")
    done = injected(node, read_only, spec_with(*environment))
    assert tree(read_only) == before
    sources = [m["source"] for m in done.spec["mounts"][3:]]
    staging = str(node.base / "staging")
    assert any(source.startswith(staging) for source in sources)
    assert any(source.startswith(str(node.driver)) for source in sources)
    search = [e for e in done.spec["process"]["env"] if e.startswith("LD_LIBRARY_PATH=")][-1]
    assert search.startswith("LD_LIBRARY_PATH=/mine:")
    assert search in engine.apply_to_process({}, done.record)["env"]


def test_probe_on_a_node_without_driver_says_so(bare_node: Node) -> None:
    with pytest.raises(DriverNotFound):
        engine.probe_command(bare_node.config)


def test_hook_of_nvidias_goes_and_nothing_else_changes_if_nothing_is_asked(
    node: Node, rootfs: Path
) -> None:
    theirs = {"path": "/x/nvidia-container-runtime-hook", "args": ["x", "prestart"]}
    other = {"path": "/bin/true", "args": ["true", "prestart"]}
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=void")
    hooked = {**spec, "hooks": {"prestart": [theirs, other]}}
    request = engine.read_request(hooked)
    before = tree(rootfs)
    done = engine.inject(
        hooked,
        request,
        None,
        engine.RootfsTarget(str(rootfs), str(node.base / "staging")),
        config=node.config,
    )
    assert done.spec == {**spec, "hooks": {"prestart": [other]}}
    assert tree(rootfs) == before
    assert not (node.base / "staging").exists()


def test_gpu_that_another_has_injected_is_not_injected_again(node: Node, rootfs: Path) -> None:
    first = injected(node, rootfs, spec_with("NVIDIA_VISIBLE_DEVICES=0")).spec
    first["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=void")
    untouched = engine.read_request(first)
    assert not untouched.wants_injection
    named = {**first, "annotations": {"cdi.k8s.io/plugin": "nvidia.com/gpu=0"}}
    assert injected(node, rootfs, named).spec == named


def test_on_another_machine_no_image_is_asked_for_its_libcuda(
    rootfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with Rootfs.open(str(rootfs)) as image:
        assert contributions._compat_finder(image, unseen_layout(())) is None
