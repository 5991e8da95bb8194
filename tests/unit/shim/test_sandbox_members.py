"""The changes of a sandbox in the spec of a container of its pod."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest

from shim import bundle
from shim.errors import BundleUnusable
from shim.sandbox import members
from shim.sandbox.errors import WrongSandboxState
from shim.sandbox.pod import Pod
from shim.sandbox.sandbox import Sandbox, State
from tests.harness.raising import raises

_IPC = {"linux": {"namespaces": [{"type": "ipc", "path": "/proc/77/ns/ipc"}]}}
SHM = {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["size=64m"]}


def _sandbox(pod: Pod | None = None) -> Sandbox:
    sandbox = Sandbox(cast("Any", None), "pod", "/bundles/pod", pod or Pod())
    sandbox.pid, sandbox.state = 77, State.READY
    return sandbox


def _spec(
    *joined: str, mounts: list[dict[str, Any]] | None = None, pid: int = 77
) -> dict[str, Any]:
    names = {"network": "net", "ipc": "ipc"}
    namespaces = [{"type": kind, "path": f"/proc/{pid}/ns/{names[kind]}"} for kind in joined]
    return {
        "root": {"path": "rootfs"},
        "mounts": [{"destination": "/proc", "type": "proc"}, SHM] if mounts is None else mounts,
        "linux": {"namespaces": [{"type": "mount"}, *namespaces]},
    }


def _sources(spec: dict[str, Any]) -> dict[str, str]:
    return {m["destination"]: m.get("source", "") for m in spec["mounts"]}


def test_the_files_are_added_and_dev_shm_takes_the_place_of_the_containers_own() -> None:
    spec = copy.deepcopy(_spec("network", "ipc"))
    assert _sandbox().admit(spec)
    assert [m["destination"] for m in spec["mounts"]] == [
        "/proc", "/dev/shm", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf",
    ]  # fmt: skip
    assert _sources(spec)["/dev/shm"] == "/bundles/pod/rootfs"
    assert _sources(spec)["/etc/hosts"] == "/bundles/pod/pod/hosts"
    assert all("rw" in m["options"] for m in spec["mounts"][1:])


def test_in_a_read_only_container_the_files_are_too_and_dev_shm_is_not() -> None:
    spec = copy.deepcopy(_spec("network", "ipc"))
    spec["root"]["readonly"] = True
    _sandbox().admit(spec)
    options = {m["destination"]: m.get("options", []) for m in spec["mounts"]}
    assert "ro" in options["/etc/hosts"]
    assert "rw" in options["/dev/shm"]


@pytest.mark.parametrize("destination", ["/dev/shm", "/dev/shm/", "/dev//shm"])
def test_what_is_mounted_by_the_spec_stays(destination: str) -> None:
    mounts = [
        {"destination": "/etc/hosts", "type": "bind", "source": "/kubelet/hosts"},
        {"destination": destination, "type": "bind", "source": "/volume"},
    ]
    spec = _spec("network", "ipc", mounts=mounts)
    assert _sandbox().admit(spec)
    assert _sources(spec)["/etc/hosts"] == "/kubelet/hosts"
    assert _sources(spec)[destination] == "/volume"
    assert len(spec["mounts"]) == 4


@pytest.mark.parametrize("kinds", [("network",), ()])
def test_dev_shm_goes_with_the_ipc_namespace(kinds: tuple[str, ...]) -> None:
    spec = copy.deepcopy(_spec(*kinds))
    assert _sandbox().admit(spec) is bool(kinds)
    assert _sources(spec)["/dev/shm"] == "shm"


def test_a_pod_with_the_nodes_ipc_has_no_dev_shm() -> None:
    spec = copy.deepcopy(_spec("network", "ipc"))
    _sandbox(Pod(own_ipc=False)).admit(spec)
    assert _sources(spec)["/dev/shm"] == "shm"


def test_namespaces_of_others_are_none_of_its_business() -> None:
    spec = _spec("network", "ipc", pid=7)
    before = copy.deepcopy(spec)
    assert not _sandbox().admit(spec)
    assert spec == before


def test_namespaces_that_nobody_holds_are_refused() -> None:
    sandbox = _sandbox()
    sandbox.state = State.ENDED
    with raises(WrongSandboxState):
        sandbox.admit(_spec("network"))
    assert not sandbox.admit(_spec())


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"linux": None},
        {"linux": {"namespaces": None}},
        {"linux": {"namespaces": [None, 1, {"type": 1, "path": 2}]}},
        {
            "mounts": 5,
            "root": 7,
            "linux": {"namespaces": [{"type": "ipc", "path": "/proc/77/ns/ipc"}]},
        },
        {
            "mounts": [None, {}],
            "linux": {"namespaces": [{"type": "ipc", "path": "/proc/77/ns/ipc"}]},
        },
    ],
)
def test_a_malformed_spec_is_left_to_the_runtime(spec: dict[str, Any]) -> None:
    _sandbox().admit(spec)


def test_what_is_noted_of_members_and_holder_is_read_again(tmp_path: Path) -> None:
    directory = str(tmp_path)
    record = bundle.RuntimeRecord("crun", "/run/root", systemd_cgroup=True)
    members.write_member(directory, "web.1-a", "/bundles/web", record)
    assert members.members(directory) == ["web.1-a"]
    where, read = members.read_member(directory, "web.1-a")
    assert (where, read.binary, read.root, read.systemd_cgroup) == (
        "/bundles/web", "crun", "/run/root", True,
    )  # fmt: skip
    members.forget_member(directory, "web.1-a")
    members.forget_member(directory, "web.1-a")
    assert members.members(directory) == []
    assert members.members(f"{directory}/none") == []
    assert members.read_holder(directory) == (0, 0)
    members.write_holder(directory, 12, 345)
    assert members.read_holder(directory) == (12, 345)


@pytest.mark.parametrize("text", ["12", "12 x", "-1 2", "1 2 3"])
def test_a_note_of_a_holder_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "holder").write_text(text)
    with pytest.raises(BundleUnusable):
        members.read_holder(str(tmp_path))
