"""``nvshim verify`` on a simulated node with a real containerd: healthy, and with one fault."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jsonschema
import pytest

from api.proto import cri_pb2 as pb
from hooks.config import load_config
from integration.agent_status import is_ready
from integration.cri.client import Cri
from integration.cri.engine import Engine
from integration.node.device_health.report import read_health
from integration.nvml.inventory import inventory_of
from integration.simulated import Scenario, SimulatedNode
from integration.verify import pods
from integration.verify.checks import CHECKS, Check
from integration.verify.errors import PodKept
from integration.verify.interrupts import Interrupts
from integration.verify.kubelet import Kubelet
from integration.verify.node import Node
from integration.verify.outcomes import CheckFailed, CheckSkipped
from integration.verify.pods import Pods as VerifyPods
from integration.verify.pods import PodSettings, find_image
from integration.verify.probe import find_program
from integration.verify.runner import VerifyOptions, verify
from shim import PROGRAM
from tests.conftest import PARTS
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.nvshim import nvshim
from tests.harness.pods import Pods, pods_of
from tests.harness.runtime import OURS, STOCK
from tests.harness.waiting import eventually
from tools.cri.plugin import NAMESPACE, CriPlugin, to_toml
from tools.images import PAUSE, pause
from tools.parts import INSTALLED, Parts
from tools.reference.documents import schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.verify.pods import Pod

GPU: Final = "nvidia.com/gpu"
ALL: Final = [check.name for check in CHECKS]

# runc, with a fault that a file selects.
RUNTIME: Final = """\
#!/usr/bin/python3
import json, os, sys

with open({faults!r}) as file:
    fault = file.read()
words = sys.argv[1:]
if fault == "exec" and "exec" in words:
    sys.exit("this runtime has no exec")
if fault in ("drop", "add", "allow") and "create" in words:
    path = words[words.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        spec = json.load(file)
    linux = spec["linux"]
    if fault == "drop":
        linux["devices"] = [d for d in linux.get("devices", []) if d["major"] != 195]
    elif fault == "add":
        node = dict(path="/dev/nvidia1", type="c", major=195, minor=1, fileMode=0o666)
        linux.setdefault("devices", []).append(node)
    else:
        linux["resources"].setdefault("devices", []).append(dict(allow=True, access="rwm"))
    with open(path, "w") as file:
        json.dump(spec, file)
os.execvp("runc", ["runc", *words])
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A cluster node as ``nvshim verify`` sees it: its containerd, kubelet and node agent."""

    node: SimulatedNode
    pods: Pods
    kubelet: KubeletPlugins
    agent: NodeAgent
    faults: Path

    def words(self, *words: str) -> list[str]:
        where = ("--config", self.node.config_path, "--cri-socket", self.pods.containerd.address)
        return ["verify", *where, *words]

    def verify(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Return the exit status and the document."""
        done = nvshim(*self.words("-o", "json", *words), check=False)
        assert done.stdout, done.stderr
        return done.code, done.document

    def red(self, *words: str) -> dict[str, Any]:
        """Return the only check that fails."""
        code, document = self.verify(*words)
        failed = [check for check in document["checks"] if check["outcome"] == "failed"]
        assert len(failed) == 1, document
        assert code == 1
        for key in ("expected", "seen", "do"):
            assert failed[0][key]
        self.is_clean()
        check: dict[str, Any] = failed[0]
        return check

    def breaks(self, fault: str) -> None:
        """Make the low-level runtime fail in some way."""
        self.faults.write_text(fault)

    def breaks_nvml(self, fault: str) -> None:
        """Have NVML fail."""
        with open(f"{self.node.state}/nvml-faults", "w", encoding="ascii") as file:
            file.write(fault)

    def policy(self, text: str) -> AbstractContextManager[None]:
        """Run the shim with a policy."""
        path = Path(self.node.config_path)
        return self.configured(f"{path.read_text(encoding='utf-8')}\n[policy]\n{text}")

    @contextmanager
    def configured(self, text: str) -> Iterator[None]:
        """Run the shim with another configuration."""
        path = Path(self.node.config_path)
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    @contextmanager
    def supervised(self, meanwhile: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Restart the agent when it exits, as systemd and the kubelet do.

        Args:
            meanwhile: called while no agent runs.
        """
        is_over = threading.Event()

        def supervise() -> None:
            while not is_over.wait(0.05):
                if self.agent.process is not None and self.agent.process.poll() is not None:
                    meanwhile()
                    self.agent.start()

        thread = threading.Thread(target=supervise)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def verified(self) -> Iterator[Node]:
        """Yield the node argument of a check, to run a check in this process."""
        config = load_config(self.node.config_path)
        os.makedirs(f"{self.node.state}/verify", exist_ok=True)
        made = PodSettings(
            handler="nvidia", namespace="tests", image=find_image(self.pods.cri),
            program=find_program(), directory=f"{self.node.state}/verify",
        )  # fmt: skip
        with Interrupts() as interrupts, VerifyPods(self.pods.cri, made, interrupts) as pods:
            yield Node(config, inventory_of(config), Engine("", ""), pods, Kubelet(config))
        shutil.rmtree(f"{self.node.state}/verify")

    def ready(self) -> list[str]:
        """Return the running pods."""
        listed = self.pods.cri.list_pod_sandbox(pb.ListPodSandboxRequest()).items
        return [pod.id for pod in listed if pod.state == pb.SANDBOX_READY]

    def is_clean(self) -> None:
        assert self.pods.ids() == []
        assert not os.path.exists(f"{self.node.state}/verify")


@pytest.fixture(scope="module")
def place(
    shim_directory: str, parts: Parts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("verify")
    root = directory / "kubelet"
    with SimulatedNode.create(str(directory / "node"), Scenario.load("two")) as node:
        with open(node.config_path, "a", encoding="utf-8") as file:
            file.write(f'kubelet-root = "{root}"\n[cdi]\nspec-dirs = ["{directory}/cdi"]\n')
            file.write("[health]\nquiet = 0.5\nlongest-quiet = 0.5\n")
        runtime, faults, options = (directory / n for n in ("runc", "faults", "options.toml"))
        faults.write_text("")
        runtime.write_text(RUNTIME.format(faults=str(faults)))
        runtime.chmod(0o755)
        options.write_text(to_toml({"BinaryName": str(runtime)}))
        ours = {"runtime_type": OURS, "options": {"ConfigPath": str(options)}}
        handlers: dict[str, dict[str, Any]] = {"nvidia": ours, "stock": {"runtime_type": STOCK}}
        # Debian 12's containerd has no CDI, and no setting for it.
        cdi = () if PARTS == INSTALLED else (f"{directory}/cdi",)
        plugin = CriPlugin(handlers, PAUSE, "stock", cdi_directories=cdi)
        with (
            pods_of(
                plugin, pause(),
                shim_directory=shim_directory, shim_config=node.config_path, parts=parts,
            ) as pods,
            KubeletPlugins(
                str(root / "device-plugins"),
                pod_resources=str(root / "pod-resources" / "kubelet.sock"),
            ) as kubelet,
        ):  # fmt: skip
            agent = NodeAgent(node, str(directory), kubelet.socket, engine=pods.containerd.address)
            with agent:
                kubelet.wait_for(GPU, 2)
                yield Place(node, pods, kubelet, agent, faults)


@pytest.fixture(autouse=True)
def whole(place: Place) -> Iterator[None]:
    """Undo what a test has broken."""
    yield
    place.breaks("")
    place.is_clean()


def test_a_node_that_is_well_passes(place: Place) -> None:
    code, document = place.verify()
    outcomes = {check["name"]: check["outcome"] for check in document["checks"]}
    assert outcomes == {**dict.fromkeys(ALL, "passed"), "restart": "skipped"}, document
    assert (code, document["passed"]) == (0, True)
    assert document["counts"] == {"passed": len(ALL) - 1, "failed": 0, "skipped": 1}
    kind = {**schema(), "oneOf": [{"$ref": "#/$defs/Verification"}]}
    jsonschema.Draft202012Validator(kind).validate(document)
    for gpu in place.node.scenario.gpus:
        assert f"GPU {gpu.index}" in told(document, "gpu")


def test_the_report_can_be_pasted(place: Place) -> None:
    place.breaks("exec")
    done = nvshim(*place.words("--skip", "health"), check=False)
    assert done.code == 1
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 and line.isprintable() for line in lines), done.stdout
    assert socket.gethostname() not in done.stdout
    assert not re.search(r"\bGPU-[0-9a-f]{8}|NVIDIA_VISIBLE_DEVICES", done.stdout)
    (failed,) = [number for number, line in enumerate(lines) if line.startswith("failed")]
    below = [line.strip().partition(":")[0] for line in lines[failed + 1 :]]
    assert [word for word in below if word in {"expected", "seen", "do"}] == [
        "expected", "seen", "do",
    ]  # fmt: skip
    assert lines[failed].split()[1] == "exec"
    assert "NVSHIM-E1203" in done.stdout
    assert "driver " in lines[1]
    assert lines[-1].startswith(f"{len(ALL) - 1} checks: {len(ALL) - 3} passed, 1 failed, 1 skip")


@pytest.mark.parametrize(
    ("fault", "words", "red", "seen"),
    [
        ("drop", "--only gpu --only no-gpu", "gpu", "/dev/nvidia0 is missing"),
        ("add", "--only gpu --only no-gpu", "no-gpu", "/dev/nvidia1 is visible"),
        (
            "allow", "--only gpu --only no-gpu",
            "no-gpu", "/dev/nvidia0 can be opened by its device number",
        ),
    ],
)  # fmt: skip
def test_what_is_broken_of_the_runtime_turns_one_check_red(
    place: Place, fault: str, words: str, red: str, seen: str
) -> None:
    place.breaks(fault)
    check = place.red(*words.split())
    assert check["name"] == red
    assert seen in check["seen"]


@pytest.mark.parametrize(
    ("handler", "seen"),
    # containerd 2 lists its handlers; an older one refuses the pod.
    [("missing", "it has .*nvidia|no runtime for"), ("stock", f"it runs {re.escape(STOCK)}")],
)
def test_a_handler_that_is_missing_or_another_runtime_is_one_failure(
    place: Place, handler: str, seen: str
) -> None:
    check = place.red("--skip", "health", "--handler", handler)
    assert check["name"] == "handler"
    assert re.search(seen, check["seen"])
    assert "nvshim configure containerd" in check["do"]


def test_a_handler_of_runcs_type_is_ours_if_its_path_is(place: Place, shim_directory: str) -> None:
    """User namespaces need this, on a containerd that has the setting."""
    handler = {"runtime_type": STOCK, "runtime_path": os.path.join(shim_directory, PROGRAM)}
    with pods_of(
        CriPlugin({"nvidia": handler, "stock": {"runtime_type": STOCK}}, PAUSE, "stock"), pause(),
        shim_directory=shim_directory, shim_config=place.node.config_path,
        parts=Parts.named("trixie"),
    ) as pods:  # fmt: skip
        for name, outcome in (("nvidia", "passed"), ("stock", "failed")):
            words = ("--only", "handler", "--handler", name, "-o", "json")
            where = ("--config", place.node.config_path, "--cri-socket", pods.containerd.address)
            (check,) = nvshim("verify", *where, *words, check=False).document["checks"]
            assert check["outcome"] == outcome, str(check)


def test_a_device_that_the_kubelet_cannot_give_is_named(place: Place) -> None:
    place.breaks_nvml("gpu1=error:15")
    try:
        place.kubelet.wait_for(GPU, 1)
        check = place.red("--only", "plugin", "--only", "devices")
    finally:
        place.breaks_nvml("")
    assert check["name"] == "devices"
    assert check["seen"].startswith("it cannot allocate GPU 1: ")
    place.kubelet.wait_for(GPU, 2)


def test_a_plugin_that_is_not_registered_is_one_failure(place: Place) -> None:
    assert place.agent.stop() == 0
    try:
        eventually(lambda: not place.kubelet.healthy(GPU), "the kubelet has no healthy GPU")
        check = place.red("--skip", "exec", "--skip", "exit", "--skip", "no-gpu", "--skip", "gpu")
    finally:
        place.agent.start()
    assert check["name"] == "plugin"
    assert "journalctl -u nvshim-node" in check["do"]
    place.kubelet.wait_for(GPU, 2)


def test_a_restart_of_the_agent_loses_nothing(place: Place) -> None:
    eventually(lambda: is_ready(load_config(place.node.config_path)), "the agent is ready")
    with place.supervised():
        code, document = place.verify("--only", "restart", "--restart-agent")
    assert code == 0, document
    assert "a container kept its GPU" in told(document, "restart")
    assert len(place.agent.said("node agent started")) > 1


def test_a_gpu_may_heal_while_the_agent_restarts(place: Place) -> None:
    place.breaks_nvml("nvmlDeviceRegisterEvents=error:3")
    place.agent.stop()
    place.agent.start()
    config = load_config(place.node.config_path)

    def states() -> set[str]:
        return {each["state"] for each in (read_health(config) or {}).values()}

    eventually(lambda: states() == {"suspect"}, "its errors are not received")
    with place.supervised(lambda: place.breaks_nvml("")):
        code, document = place.verify("--only", "restart", "--restart-agent")
    assert code == 0, document
    eventually(lambda: states() == {"healthy"}, "they are")


@contextmanager
def verifying(place: Place) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a running verification that has created a pod."""
    with subprocess.Popen(
        [sys.executable, "-m", "integration.cli", *place.words("--only", "gpu", "--only", "exec")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        eventually(place.ready, "the run has created a pod")
        yield process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_after_a_signal(place: Place, number: int, status: int) -> None:
    with verifying(place) as process:
        process.send_signal(number)
        assert process.wait(timeout=60) == status
    place.is_clean()


def test_what_a_run_leaves_that_was_killed_the_next_one_removes(place: Place) -> None:
    with verifying(place) as process:

        def has_a_pod() -> bool:
            """Whether a pod has a container; then the run stays stopped, before it removes them.

            No container is being started: containerd 1.6 cannot remove the pod of one whose
            start was given up.
            """
            process.send_signal(signal.SIGSTOP)
            listed = place.pods.cri.list_containers(pb.ListContainersRequest()).containers
            states = {container.state for container in listed}
            if place.ready() and states and pb.CONTAINER_CREATED not in states:
                return True
            process.send_signal(signal.SIGCONT)
            return False

        eventually(has_a_pod, "the run has created a pod")
        process.kill()
        process.wait()
    assert place.pods.ids()
    with place.verified():  # their devices must not be in use
        assert place.pods.ids() == []


def test_a_pod_that_the_engine_keeps_is_named_with_what_to_do(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that was given up leaves a task of a container that containerd calls created."""
    monkeypatch.setattr(pods, "_REMOVE_TIMEOUT", 0.0)
    monkeypatch.setattr(Cri, "start_container", lambda *_, **__: None, raising=False)
    ctr = partial(place.pods.containerd.ctr, namespace=NAMESPACE)
    started: list[str] = []

    def give_up(node: Node) -> str:
        def work(pod: Pod) -> None:
            started.append(pod.start("hold").id)
            ctr("tasks", "start", "--detach", "--null-io", *started)

        node.pods.attempt(work)
        return "it was given up"

    options = VerifyOptions(
        "nvidia", place.pods.containerd.address, [Check("start", "a start", give_up)]
    )
    verified = partial(verify, load_config(place.node.config_path), options, lambda _: None)
    passed, failed = verified().results
    assert (passed.told, failed.outcome) == ("it was given up", "failed")
    assert re.match(r"to remove nvshim-verify-\w{8} of a verification: .*running task", failed.seen)
    assert failed.do.startswith("restart the engine")
    with pytest.raises(PodKept, match=r"^NVSHIM-E2676 pod-kept: .* Restart the engine"):
        verified()
    # As after a restart of containerd, but the other tests need this one.
    ctr("tasks", "rm", "--force", *started)
    with place.verified():
        assert place.pods.ids() == []


def test_a_run_leaves_nothing_of_one_that_was_killed_nor_a_cgroup_of_its_own(place: Place) -> None:
    def left() -> set[str]:
        """Return the cgroups that the engine creates for pods without a parent."""
        return {*glob.glob("/sys/fs/cgroup/k8s.io"), *glob.glob("/sys/fs/cgroup/*/k8s.io")}

    before = left()
    os.makedirs(f"{place.node.state}/verify/a-pod-of-it")
    assert place.verify("--only", "exit")[0] == 0
    place.is_clean()
    assert left() == before


def test_two_at_once_do_not_remove_each_others_pods(place: Place) -> None:
    path = f"{place.node.state}/verify"
    os.mkdir(path)
    with open_directory(path) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        done = nvshim(*place.words(), check=False)
    os.rmdir(path)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("NVSHIM-E2673 verify-running: ")


def test_pods_that_a_kubelet_does_not_know_are_made_again_when_it_removes_them(
    place: Place,
) -> None:
    removed: list[str] = []

    def work(pod: Pod) -> str:
        if len(removed) < 2:
            removed.append(pod.id)
            place.pods.cri.stop_pod_sandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod.id))
        return str(pod.run("exit", "7").code)

    with place.verified() as node:
        assert node.pods.attempt(work) == "7"
        assert len(set(removed)) == 2


def test_a_container_that_is_killed_just_before_its_pod_is_stopped_says_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet stops the containers first, and the pod a moment later."""
    # A busy machine needs longer between the two.
    monkeypatch.setattr(pods, "_REMOVAL_GRACE", 60.0)
    stopping: list[threading.Timer] = []

    def work(pod: Pod) -> None:
        if stopping:
            return
        container = pod.start("hold")
        container.stop(0)
        stop = pb.StopPodSandboxRequest(pod_sandbox_id=pod.id)
        stopping.append(threading.Timer(0.5, place.pods.cri.stop_pod_sandbox, (stop,)))
        stopping[0].start()
        code = container.exit_code()
        raise CheckFailed("an exit code of its own", seen=f"exit code {code}", do="nothing")

    with place.verified() as node:
        node.pods.attempt(work)
        stopping[0].join()


def test_a_kubelet_that_removes_each_pod_keeps_it_from_being_checked(place: Place) -> None:
    def work(pod: Pod) -> None:
        place.pods.cri.stop_pod_sandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod.id))
        pod.run("exit", "7")

    with place.verified() as node, pytest.raises(CheckSkipped, match="as a kubelet does"):
        node.pods.attempt(work)


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--cri-socket", "/nowhere"), "NVSHIM-E2670"), (("--only", "restart"), "NVSHIM-E2675")],
)
def test_what_cannot_be_checked_is_neither_well_nor_a_failure(
    place: Place, words: tuple[str, ...], code: str
) -> None:
    done = nvshim(*place.words("-o", "json", *words), check=False)
    assert (done.code, done.stdout) == (2, "")
    assert json.loads(done.stderr)["error"]["code"] == code


def test_where_no_request_is_believed_pods_are_of_a_trusted_namespace(place: Place) -> None:
    for trusted, outcome in (("", "skipped"), ('trusted-namespaces = ["gpu"]', "passed")):
        with place.policy(f'mode = "strict"\n{trusted}\n'):
            _, document = place.verify("--only", "gpu", "--only", "exit")
        assert [check["outcome"] for check in document["checks"]] == ["passed", outcome]


# The GPU checks of a healthy node run the same code; tests/unit/verify/test_visibility.py checks
# what a container sees of MIG devices.
@pytest.mark.thorough
def test_mig_devices_are_checked_one_by_one_on_a_node_without_a_kubelet(
    place: Place, tmp_path: Path
) -> None:
    with (
        SimulatedNode.create(str(tmp_path / "node"), Scenario.load("mig")) as node,
        place.configured(Path(node.config_path).read_text(encoding="utf-8")),
    ):
        code, document = place.verify()
        found = inventory_of(load_config(node.config_path)).mig_devices
        Path(node.state, "nvml-faults").write_text("gpu0=error:15", encoding="ascii")
        check = place.red("--only", "devices")
    assert check["seen"].startswith("it cannot allocate GPU 0: ")
    assert code == 0, document
    assert len(found) > 1
    for device in found:
        assert f"MIG device {device.gpu}:{device.index}" in told(document, "gpu")
    skipped = {c["name"] for c in document["checks"] if c["outcome"] == "skipped"}
    assert skipped == {"plugin", "answer", "health", "restart"}
    assert told(document, "plugin").startswith("no kubelet")


def told(document: dict[str, Any], name: str) -> str:
    (check,) = [check for check in document["checks"] if check["name"] == name]
    return str(check["told"])


@contextmanager
def open_directory(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)
