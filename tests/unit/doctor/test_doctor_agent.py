"""The findings about the node agent, from its status file."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from integration.doctor.examination import choose, examine
from integration.doctor.findings import Finding, Severity
from integration.node.options import DRA_DRIVER
from tests.unit.doctor.trees import CHECKPOINT, OURS, Tree

STATE: Final = "/run/containerd-shim-nvidia"
CODES: Final = ("D104", "D105", "D106", "D107", "D108", "D109", "D110", "D111", "D112")


@contextmanager
def agent(tree: Tree, **status: Any) -> Iterator[None]:
    """Run a stand-in for a node's agent: it holds the lock and has a status file."""
    document = {"pid": 7, "poll": 60.0, "faults": [], "resources": {}, **status}
    tree.write(f"{STATE}/node.json", json.dumps(document))
    tree.write(f"{STATE}/node.lock", "7\n")
    if not os.path.lexists(tree.at("/dev/kmsg")):
        tree.node("/dev/kmsg", 1, 11)
    with open(tree.at(f"{STATE}/node.lock"), encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def served(devices: int, healthy: int) -> dict[str, Any]:
    return {"nvidia.com/gpu": {"devices": devices, "healthy": healthy}}


def found(tree: Tree) -> dict[str, Finding]:
    findings = examine(tree.places(), choose(CODES)).findings
    assert len({finding.code for finding in findings}) == len(findings)
    return {finding.code.removeprefix("NVSHIM-"): finding for finding in findings}


def test_of_an_agent_that_does_its_work_nothing_is_said(tree: Tree) -> None:
    tree.link("/etc/systemd/system/multi-user.target.wants/nvshim-node.service", "/x")
    with agent(tree, resources=served(2, 2)):
        assert found(tree) == {}
    assert set(found(tree)) == {"D104"}  # it has exited


@pytest.mark.parametrize("driver", ["gpu.nvidia.com", DRA_DRIVER])
def test_a_node_of_claims_needs_no_device_plugin(tree: Tree, driver: str) -> None:
    tree.remove(CHECKPOINT)
    with agent(tree):
        assert set(found(tree)) == {"D106"}
        tree.write(f"/var/lib/kubelet/plugins_registry/{driver}-reg.sock", "")
        assert found(tree) == {}


def test_one_that_does_not_look_any_more_is_found(tree: Tree) -> None:
    with agent(tree):
        status = tree.at(f"{STATE}/node.json")
        before = os.stat(status).st_mtime - 3600
        os.utime(status, (before, before))
        (finding,) = found(tree).values()
    assert finding.code == "NVSHIM-D104"
    assert finding.found.startswith("it is running, but last checked the node 36")


def test_what_it_says_is_wrong_is_handed_on(tree: Tree) -> None:
    with agent(tree, faults=["plugin: no\x1b[31m"], resources=served(2, 1)):
        tree.remove("/dev/kmsg")
        seen = found(tree)
    assert set(seen) == {"D105", "D108", "D109"}
    assert seen["D105"].found == "plugin: no?[31m"
    assert seen["D108"].found == "nvidia.com/gpu: 1 of 2 are reported as unhealthy"
    assert "/dev/kmsg" in seen["D109"].found
    assert seen["D109"].severity is Severity.NOTE


def test_two_device_plugins_are_found(tree: Tree) -> None:
    tree.process(77, "/usr/bin/nvidia-device-plugin", uid=0, mounts=9)
    with agent(tree):
        assert found(tree) == {}  # it leaves the GPUs to that one
    with agent(tree, resources=served(2, 2)):
        (finding,) = found(tree).values()
    assert finding.code == "NVSHIM-D107"
    assert "process 77" in finding.found


def test_an_engine_that_leaves_out_what_the_kubelet_hands_on_is_found(tree: Tree) -> None:
    why = "containerd 1.7.24 does not read CDI names of the CRI, or is not set to"
    told = {"device_list_strategies": ["envvar", "cdi-cri"], "device_list_why": why}
    with agent(tree, resources=served(2, 2), **told):
        (finding,) = found(tree).values()
    assert finding.code == "NVSHIM-D110"
    assert finding.found == f"{why}: devices are passed to containers by envvar, cdi-cri"
    assert finding.command == "nvshim configure containerd --enable-cdi"
    with agent(tree, resources=served(2, 2), **{**told, "device_list_why": ""}):
        assert found(tree) == {}


def test_a_container_without_what_the_kubelet_has_given_it_is_found(tree: Tree) -> None:
    given = {"namespace": "team", "container": "main", "resource": "nvidia.com/gpu", "pod_uid": ""}
    rows = [
        {**given, "pod": "runs", "device": "GPU-a", "pid": 7},
        {**given, "pod": "waits", "device": "GPU-b", "pid": 0},
    ]
    with agent(tree, resources=served(2, 2)):
        tree.write(f"{STATE}/ledger.json", json.dumps({"unheld": rows}))
        (finding,) = found(tree).values()
    assert finding.code == "NVSHIM-D111"
    assert finding.found == "team/runs/main (process 7) runs without GPU-a"


def test_a_pipe_of_mps_whose_daemon_is_dead_is_found_where_device_plugins_have_it(
    tree: Tree,
) -> None:
    tree.write("/run/nvidia/mps/nvidia.com/gpu/pipe/control", "")
    (finding,) = examine(tree.places(), choose(["D013"])).findings
    assert "/run/nvidia/mps/nvidia.com/gpu/pipe/control" in finding.found
    tree.process(78, "nvidia-cuda-mps-control", "-d")
    assert examine(tree.places(), choose(["D013"])).findings == ()


def test_a_shim_that_does_not_go_by_the_kubelets_record_is_found(tree: Tree) -> None:
    with agent(tree, resources=served(2, 2)):
        assert found(tree) == {}
        os.chmod(tree.at(CHECKPOINT), 0o666)
        assert set(found(tree)) == {"D112"}
        os.chmod(tree.at(CHECKPOINT), 0o600)
        tree.process(820, "/usr/bin/kubelet", "--root-dir=/data/kubelet")
        moved = f"/data/kubelet/{CHECKPOINT.removeprefix('/var/lib/kubelet/')}"
        with open(tree.at(CHECKPOINT), encoding="utf-8") as file:
            tree.write(moved, file.read())
        (finding,) = found(tree).values()
        assert finding.code == "NVSHIM-D112"
        assert "looks in /var/lib/kubelet, but the kubelet's root is /data/kubelet" in finding.found
        with open(tree.at(OURS), encoding="utf-8") as file:
            text = file.read()
        tree.write(OURS, text.replace("[node]\n", '[node]\nkubelet-root = "/data/kubelet"\n'))
        assert found(tree) == {}
        tree.write(OURS, text.replace('mode = "default"', 'mode = "nvidia"'))
        assert found(tree) == {}
