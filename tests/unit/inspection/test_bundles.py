from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.containers import bundles
from integration.containers.bundles import Pod, find_containers, state_directories
from integration.containers.cgroups import cgroups_in, own_cgroup

CRI = {
    "io.kubernetes.cri.sandbox-id": "sand",
    "io.kubernetes.cri.sandbox-name": "web",
    "io.kubernetes.cri.sandbox-namespace": "team",
}


def test_containers_of_pods_and_others_are_found(
    make_bundle: Callable[..., str], tmp_path: Path
) -> None:
    kind = "io.kubernetes.cri.container-type"
    make_bundle("sand", annotations={**CRI, kind: "sandbox"})
    names = {"io.kubernetes.cri.container-name": "server", kind: "container"}
    make_bundle("one", annotations={**CRI, **names}, address="unix:///s/1", record={"format": 1})
    make_bundle("docker", namespace="moby", bootstrap_json='{"address": "unix:///s/2"}')
    make_bundle("odd", namespace="moby", annotations={"nerdctl/name": "friendly"})
    found = find_containers([str(tmp_path / "state"), str(tmp_path / "none")])
    assert [(c.namespace, c.id, c.title) for c in found] == [
        ("k8s.io", "one", "team/web/server"),
        ("k8s.io", "sand", "team/web/(sandbox)"),
        ("moby", "docker", "docker"),
        ("moby", "odd", "friendly"),
    ]
    assert [c.address for c in found] == ["/s/1", "", "/s/2", ""]
    assert [c.record for c in found] == [{"format": 1}, None, None, None]
    assert {c.group for c in found[:2]} == {"sand"}
    assert found[1].sandbox


@pytest.mark.parametrize("spoilt", ["missing", "empty", "fifo", "link"])
@pytest.mark.parametrize("file", ["config.json", "nvidia.json"])
def test_a_bundle_that_is_half_there_is_a_container_of_which_less_is_known(
    make_bundle: Callable[..., str], tmp_path: Path, file: str, spoilt: str
) -> None:
    path = os.path.join(make_bundle("half", annotations=CRI, record={"format": 1}), file)
    os.unlink(path)
    if spoilt == "empty":
        os.mknod(path)
    elif spoilt == "fifo":
        os.mkfifo(path)
    elif spoilt == "link":
        os.symlink("/etc/passwd", path)
    (found,) = find_containers([str(tmp_path / "state")])
    is_spec = file == "config.json"
    assert (found.id, found.pid) == ("half", 0)
    assert found.pod == (None if is_spec else Pod("team", "web"))
    assert found.record == ({"format": 1} if is_spec else None)


def test_annotations_that_are_none_are_not_believed(
    make_bundle: Callable[..., str], tmp_path: Path
) -> None:
    spec = {"annotations": {"io.kubernetes.cri.sandbox-name": ["web"], "nerdctl/name": 7}}
    make_bundle("a", spec=spec)
    make_bundle("b", spec={"annotations": []})
    found = find_containers([str(tmp_path / "state")])
    assert [(c.pod, c.name) for c in found] == [(None, ""), (None, "")]


def test_a_pid_that_is_another_process_by_now_is_not_its_own(
    make_bundle: Callable[..., str], tmp_path: Path
) -> None:
    with subprocess.Popen(["sleep", "100"]) as stranger:
        make_bundle("mine", init_pid=str(stranger.pid), address="unix:///nonexistent")
        make_bundle("gone", init_pid="4194305")
        make_bundle("odd", init_pid="seven")
        make_bundle("written-now", init_pid="")
        make_bundle("made-now")
        found = find_containers([str(tmp_path / "state")])
        assert {c.id: (c.pid, c.has_stopped) for c in found} == {
            "mine": (0, True),
            "gone": (0, True),
            "odd": (0, False),
            "written-now": (0, False),
            "made-now": (0, False),
        }
        stranger.kill()


def test_a_process_in_a_cgroup_of_the_containers_name_is_its_own(tmp_path: Path) -> None:
    for line, container, same in (
        ("0::/kubepods/pod1/abc", "abc", True),
        ("4:memory:/kubepods.slice/cri-containerd-abc.scope", "abc", True),
        ("0::/kubepods/pod1/abcd", "abc", False),
        ("0::/xabc/", "abc", False),
    ):
        assert any(own_cgroup(path, container) for _, path in cgroups_in(line)) is same, line


def test_the_directories_that_are_there_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "KNOWN_STATES", (str(tmp_path), "/nonexistent"))
    assert state_directories() == (str(tmp_path),)
    assert state_directories(["/a/../b", "/b"]) == ("/b",)


def test_both_versions_of_a_spec_are_kept(make_bundle: Callable[..., str], tmp_path: Path) -> None:
    make_bundle("new", before={"hostname": "old"}, record={"format": 1, "edits": {}})
    (found,) = find_containers([str(tmp_path / "state")])
    assert found.spec_before() == {"hostname": "old"}
    assert "hostname" not in found.spec()
    os.unlink(f"{found.bundle}/nvidia-before.json")
    assert found.spec_before() is None
