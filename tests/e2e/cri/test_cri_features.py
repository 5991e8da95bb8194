"""A handler with runc's type announces its features to the kubelet through containerd."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any, Final

import pytest

from api.proto import cri_pb2 as pb
from integration.simulated import SimulatedNode
from tests.harness.launcher import REPOSITORY
from tests.harness.pods import IDLE, Pods, pods_of
from tests.harness.releases import UNSTABLE
from tests.harness.runtime import STOCK
from tools.cri.plugin import CriPlugin
from tools.images import GLIBC, PAUSE, glibc, pause
from tools.parts import Parts

pytestmark = pytest.mark.newest

PROGRAM: Final = "containerd-shim-nvidia-v1"


def ask(*arguments: str) -> Any:
    """What ``nvshim`` answers."""
    argv = [sys.executable, "-m", "integration.cli", *arguments, "-o", "json"]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    return document.get("items", document)


def handler(shim_directory: str, runc: str) -> dict[str, Any]:
    """Return the handler in docs/engines.md with runc's type, with this machine's paths."""
    with open(os.path.join(REPOSITORY, "docs/engines.md"), encoding="utf-8") as file:
        (text,) = re.findall(r"```toml\n(# [^`]*?runtime_path[^`]*)```", file.read())
    runtimes = tomllib.loads(text)["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]
    table: dict[str, Any] = runtimes["runtimes"]["nvidia"]
    assert os.path.basename(table["runtime_path"]) == PROGRAM
    table["runtime_path"] = os.path.join(shim_directory, PROGRAM)
    table["options"] |= {"SystemdCgroup": False, "BinaryName": runc}  # systemd does not run here
    return table


@pytest.fixture
def pods(shim_directory: str, two_gpus: SimulatedNode) -> Iterator[Pods]:
    parts = Parts.of_release(UNSTABLE)
    ours = handler(shim_directory, parts.runc)
    handlers = {"nvidia": ours, "runc": {"runtime_type": STOCK, "options": ours["options"]}}
    with pods_of(
        CriPlugin(handlers, PAUSE, "nvidia"),
        glibc(),
        pause(),
        shim_directory=shim_directory,
        shim_config=two_gpus.config_path,
        parts=parts,
    ) as pods:
        yield pods


def test_a_handler_of_runcs_type_announces_what_runcs_does_and_gives_gpus(
    pods: Pods, two_gpus: SimulatedNode
) -> None:
    told = pods.cri.status(pb.StatusRequest()).runtime_handlers
    features = {each.name: each.features for each in told}
    assert features["nvidia"] == features["runc"]
    assert features["runc"].recursive_read_only_mounts
    assert features["runc"].user_namespaces
    uuid = two_gpus.scenario.gpus[1].uuid
    pod = pods.run()
    container = pod.start(*IDLE, image=GLIBC, granted={"NVIDIA_VISIBLE_DEVICES": uuid})
    assert uuid in container.exec("nvidia-smi", "-L").stdout
    with open(os.path.join(container.bundle, "nvidia.json"), encoding="utf-8") as file:
        assert json.load(file)["request"]["devices"] == [uuid]
    (shim,) = pod.shims
    # Our commands recognize the shim and the container whatever type containerd stores.
    where = ("--containerd-state", os.path.join(pods.containerd.directory, "state"))
    (row,) = [each for each in ask("ps", *where) if each["pid"] == shim]
    assert (row["kind"], row["id"]) == ("shim", pod.id)
    assert {each["id"]: each["gpus"] for each in row["containers"]} == {container.id: [uuid]}
    rows = ask("list", "--config", two_gpus.config_path, *where)
    assert [[c["id"] for c in each["containers"]] for each in rows] == [[], [container.id]]
    mount = pb.Mount(
        host_path="/sys", container_path="/host-sys", readonly=True, recursive_read_only=True,
        propagation=pb.PROPAGATION_PRIVATE,
    )  # fmt: skip
    deep = pod.start(*IDLE, image=GLIBC, mounts=[mount])
    assert deep.exec("ls", "/host-sys/kernel").code == 0
