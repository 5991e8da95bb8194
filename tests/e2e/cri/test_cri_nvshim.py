"""``nvshim`` commands on a node with GPU pods, run as an operator runs them."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from hooks.node.roots import cuda_of_branch
from integration.simulated import SimulatedNode
from shim import VERSION
from tests.harness.nvshim import nvshim
from tests.harness.pods import IDLE, PodContainer, Pods
from tests.harness.waiting import eventually
from tools.images import GLIBC

# A name that would clear a terminal, start a new line, and read backwards.
HOSTILE: Final = "evil\x1b[2J\nGPU\x9b7m-0\u202e"
PROGRAM: Final = "containerd-shim-nvidia-v1"


def ask(*arguments: str) -> Any:
    document = nvshim(*arguments, "-o", "json").document
    return document.get("items", document)


def tell(*arguments: str) -> list[str]:
    done = nvshim(*arguments)
    lines = done.stdout.splitlines()
    # No raw control character of a name reached the terminal.
    assert "\n".join(lines) + "\n" == done.stdout
    assert all(line.isprintable() for line in lines), done.stdout
    return lines


def _with_gpu(gpus: Pods, pod: Any, node: SimulatedNode, index: int, **fields: Any) -> PodContainer:
    granted = {"NVIDIA_VISIBLE_DEVICES": node.scenario.gpus[index].uuid}
    env = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    container: PodContainer = pod.start(
        *fields.pop("command", IDLE), image=GLIBC, env=env, granted=granted, **fields
    )
    return container


def test_commands_tell_of_a_pod_with_two_gpu_containers(
    gpus: Pods, two_gpus: SimulatedNode
) -> None:
    node = two_gpus
    pod = gpus.run()
    # The container's init calls itself a shim; it is listed only as a container.
    lie = ("bash", "-c", f"exec -a {PROGRAM} bash -c 'sleep 1000; :' -id {pod.id}")
    first = _with_gpu(gpus, pod, node, 0, name="server", command=lie)
    second = _with_gpu(gpus, pod, node, 1, name=HOSTILE)
    third = pod.start(*IDLE)
    uuids = [gpu.uuid for gpu in node.scenario.gpus]
    state = os.path.join(gpus.containerd.directory, "state")
    where = ("--containerd-state", state)
    config = ("--config", node.config_path)
    name = pod.config.metadata.name
    of_pod = {"namespace": "tests", "name": name}

    # -- list
    rows = ask("list", *config, *where)
    assert [row["uuid"] for row in rows] == uuids
    holders = [
        [(c["id"], c["name"], c["pod"], c["pid"]) for c in row["containers"]] for row in rows
    ]
    assert holders == [
        [(first.id, "server", of_pod, first.pid)],
        [(second.id, HOSTILE, of_pod, second.pid)],
    ]
    assert [(row["kind"], row["numa_node"], row["health"], row["fault"]) for row in rows] == [
        ("gpu", 0, None, None), ("gpu", 1, None, None),
    ]  # fmt: skip
    table = tell("list", "-o", "wide", *config, *where)
    assert [line.split()[0] for line in table] == ["INDEX", "0", "1"]
    assert table[2].endswith(rf"tests/{name}/evil\x1b[2J\nGPU\x9b7m-0\u202e")

    # -- ps
    (shim,) = pod.shims
    processes = {row["pid"]: row for row in ask("ps", *where)}
    row = processes[shim]
    assert (row["kind"], row["namespace"], row["id"], row["pod"]) == (
        "shim", "k8s.io", pod.id, of_pod,
    )  # fmt: skip
    assert {c["id"]: c["gpus"] for c in row["containers"]} == {
        first.id: uuids[:1], second.id: uuids[1:], third.id: [],
    }  # fmt: skip
    assert row["gpus"] in (uuids, uuids[::-1])
    assert row["version"] == VERSION
    assert 1 << 20 < row["memory"]["pss_bytes"] < 64 << 20
    assert first.pid not in processes
    ours = [r for r in processes.values() if r["containerd"] == gpus.containerd.address]
    assert {r["kind"] for r in ours} <= {"shim", "fork-server", "spare"}
    assert f"tests/{name}" in "\n".join(tell("ps", "-o", "wide", *where))

    # The shims' arguments show where containerd keeps its state.
    holding = {c["id"] for row in ask("list", *config) for c in row["containers"]}
    assert {first.id, second.id} <= holding

    # A forked shim is warm; the fork server and its spare are listed separately.
    def servers() -> set[str]:
        rows = [r for r in ask("ps", *where) if r["containerd"] == gpus.containerd.address]
        return {r["kind"] for r in rows}

    eventually(lambda: {"fork-server", "spare"} <= servers(), "a fork server and a spare run")
    other = gpus.run()
    (warm,) = [r for r in ask("ps", *where) if r["pid"] in other.shims]
    assert warm["warm"] is True

    # -- explain
    told = ask("explain", f"{name}/server", *config, *where)
    assert told["container"]["id"] == first.id
    assert [gpu["uuid"] for gpu in told["record"]["grant"]["gpus"]] == uuids[:1]
    spec = json.loads(
        gpus.containerd.ctr("containers", "info", first.id, namespace="k8s.io").stdout
    )["Spec"]
    with open(os.path.join(first.bundle, "config.json")) as file:
        after = json.load(file)
    assert _undone(after, told["differences"]) == spec
    lines = tell("explain", second.id[:20], "-v", "--diff", *config, *where)
    assert lines[0].endswith(rf"/evil\x1b[2J\nGPU\x9b7m-0\u202e ({second.id} in k8s.io)")
    assert any("+ NVIDIA_CTK_LIBCUDA_DIR" in line for line in lines)
    assert "nothing requested" in "\n".join(tell("explain", third.id, *where))
    done = nvshim("explain", "no-such-container", *where, check=False)
    assert (done.code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("NVSHIM-E2511 container-unknown: ")
    listed = nvshim("explain", name, *where, check=False)
    assert "NVSHIM-E2512" in listed.stderr
    assert listed.stderr.rstrip("\n").isprintable()

    # -- info
    known = ask("info", *config)
    assert known["driver"]["version"] == node.driver_version
    assert (known["inventory"]["source"], known["inventory"]["stale"]) == ("kept", None)
    assert known["inventory"]["key"]["observations"] > 10
    assert [root["root"] for root in known["roots"] if root["chosen"]] == [node.driver_root]
    assert {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"} <= {
        device["path"] for device in known["devices"] if device["fault"] is None
    }
    cuda = cuda_of_branch(node.driver_version)
    assert f"driver         {node.driver_version}, CUDA {cuda}" in "\n".join(tell("info", *config))

    # A stopped container holds nothing.
    first.stop()
    assert [len(row["containers"]) for row in ask("list", *config, *where)] == [0, 1]


def _undone(after: dict[str, Any], differences: list[dict[str, Any]]) -> dict[str, Any]:
    """Remove the additions from a spec, and check that the shim changed nothing else."""
    for each in differences:
        assert each["kind"] == "added", each
        *above, last = each["path"].split(".")
        parent = after
        for key in above:
            parent = parent[key]
        value = parent[last]
        if isinstance(value, list):
            value.reverse()
            value.remove(each["after"])
            value.reverse()
            if not value:
                del parent[last]
        else:
            del parent[last]
    return after
