"""Pods and their containers through the CRI, over its socket, as a kubelet runs them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from api.proto import cri_pb2 as pb
from integration.cri.client import Cri
from integration.cri.errors import CriRefused, CriUnreachable
from integration.node.services.metrics.pod_labels import PodLabels
from tests.harness.pods import IDLE, PodContainer, Pods, host_directory
from tests.harness.raising import raises
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually

# Prints a process's identity, namespaces, cgroup and permissions.
PORTRAIT: Final = """
id; pwd; umask; hostname | tr -d 0-9
env | grep -v HOSTNAME | sort
cat /proc/self/cgroup | sed 's/[0-9a-f]\\{64\\}/ID/; s/pod[0-9-]*/POD/'
grep -E 'Cap|NoNewPrivs|Seccomp:|SigIgn|SigBlk' /proc/self/status
cat /proc/self/oom_score_adj /proc/self/limits
cut -d' ' -f4- /proc/self/mountinfo | sed 's/[0-9a-f]\\{64\\}/ID/g; s/pod[0-9-]*/POD/g
  s/lowerdir=[^ ]*/LAYERS/; s/nvshim-[0-9a-f]*/NS/g; s/:[0-9]* / /g'
ls -l /dev | tr -s ' ' | cut -d' ' -f1,3-6,10-
stat -L -c '%n %F %u:%g' /proc/self/fd/[012]
echo end of it
"""


def test_pod_and_its_containers_have_one_shim(pods: Pods) -> None:
    pod = pods.run()
    first, second = pod.start(*IDLE), pod.start(*IDLE)
    assert len(pod.shims) == 1
    assert {_parent(c.pid) for c in (first, second)} == set(pod.shims)
    assert pod.status.runtime_handler == pods.handler
    other = pods.run()
    assert len(other.shims) == 1
    assert other.shims != pod.shims
    (shim,) = pod.shims
    pod.remove()
    eventually(lambda: not is_alive(shim), "the shim has exited")
    assert pods.ids() == [other.id]


@pytest.mark.anyio
async def test_labels_of_a_pod_are_told_for_metrics(pods: Pods) -> None:
    config = pods.config()
    config.labels["app.kubernetes.io/name"] = "web"
    pods.run_config(config)
    labels = PodLabels(["app.kubernetes.io/name", "tier"], (), [pods.containerd.address])
    uid = config.metadata.uid
    assert labels.names == ("app_kubernetes_io_name", "tier")
    assert await labels.of({uid, "unknown"}) == {uid: ("web", ""), "unknown": ("", "")}


def test_container_is_created_started_stopped_and_removed(pods: Pods) -> None:
    pod = pods.run()
    container = pod.create("sh", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done")
    assert container.state == "CREATED"
    container.start()
    assert container.state == "RUNNING"
    assert container.status.started_at >= container.status.created_at
    pid = container.pid
    eventually(lambda: container.output() == "up\n", "the container has set its trap")
    container.stop(grace=10)
    status = container.status
    assert (container.state, status.exit_code, status.reason) == ("EXITED", 7, "Error")
    assert status.finished_at >= status.started_at
    assert not is_alive(pid)
    container.remove()
    with pytest.raises(CriRefused, match="not found"):
        _ = container.status
    # The kubelet repeats this call.
    container.remove()


def test_container_that_does_not_heed_a_signal_is_killed_after_the_grace_period(pods: Pods) -> None:
    pod = pods.run()
    script = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    container = pod.start("sh", "-c", script)
    eventually(lambda: container.output() == "up\n", "the container has set its trap")
    began = time.monotonic()
    container.stop(grace=1)
    assert 1 <= time.monotonic() - began < 10
    assert container.exit_code() == 137
    # A pod is stopped without a grace period.
    stubborn = pod.start("sh", "-c", script)
    pod.stop()
    assert stubborn.exit_code() == 137
    assert not pod.is_ready


def test_container_gets_its_environment_directory_and_mounts(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "word").write_text("of the host")
    pod = pods.run()
    script = "echo $WORD; pwd; cat /in/word; echo; (echo > /in/no) || echo refused; echo y > /out/y"
    container = pod.run(
        "sh", "-c", script,
        env={"WORD": "a b=c"},
        working_dir="/tmp",
        mounts=[
            host_directory(str(tmp_path), "/in", readonly=True),
            host_directory(str(tmp_path), "/out"),
        ],
    )  # fmt: skip
    assert container.status.exit_code == 0
    assert container.output().splitlines() == ["a b=c", "/tmp", "of the host", "refused"]
    assert (tmp_path / "y").read_text() == "y\n"
    assert [(m.container_path, m.readonly) for m in container.status.mounts] == [
        ("/in", True),
        ("/out", False),
    ]


def test_log_has_both_streams_line_by_line_and_can_be_reopened(pods: Pods) -> None:
    pod = pods.run()
    container = pod.start(
        "sh", "-c", "mkfifo /go; echo one; echo two >&2; read x < /go; echo three; sleep 1000"
    )
    eventually(lambda: len(container.log_lines()) >= 2, "its first lines")
    assert {(n.stream, n.tag, n.text) for n in container.log_lines()} >= {
        ("stdout", "F", "one"),
        ("stderr", "F", "two"),
    }
    rotated = f"{container.log_path}.1"
    os.rename(container.log_path, rotated)
    pods.cri.reopen_container_log(pb.ReopenContainerLogRequest(container_id=container.id))
    assert container.exec("sh", "-c", "echo > /go").code == 0
    eventually(lambda: "three\n" in container.output(), "the new log")
    assert container.output() == "three\n"
    with open(rotated) as file:
        assert "three" not in file.read()


def test_long_output_arrives_whole(pods: Pods) -> None:
    pod = pods.run()
    container = pod.run("sh", "-c", "seq 1 200000; seq 1 1000 >&2")
    out = eventually(
        lambda: text if (text := container.output()).endswith("\n200000\n") else "",
        "the last line",
    )
    assert out == "".join(f"{n}\n" for n in range(1, 200001))
    assert container.output("stderr") == "".join(f"{n}\n" for n in range(1, 1001))


def test_exec_has_both_streams_a_code_and_a_limit(pods: Pods) -> None:
    container = pods.run().start(*IDLE, env={"WORD": "its own"})
    done = container.exec("sh", "-c", "echo $WORD; echo err >&2; exit 9")
    assert (done.code, done.stdout, done.stderr) == (9, "its own\n", "err\n")
    assert len(container.exec("sh", "-c", "seq 1 300000").lines) == 300000
    with pytest.raises(CriRefused, match=r"no-such-program"):
        container.exec("no-such-program")
    began = time.monotonic()
    with raises(CriUnreachable, match="timeout 1s exceeded"):
        container.exec("sh", "-c", "exec sleep 78", timeout=1)
    assert time.monotonic() - began < 20
    # The exec that exceeded its limit was killed; the container was not.
    eventually(lambda: "sleep 78" not in container.exec("ps").stdout, "it is gone")
    assert container.state == "RUNNING"


def test_containers_look_alike_with_this_shim_and_with_containerds_own(pods: Pods) -> None:
    seen = {}
    for handler in ("nvidia", "plain", "runc"):
        pod = pods.run(handler=handler)
        container = pod.start("sh", "-c", f"{PORTRAIT}sleep 1000", env={"A": "b"})
        executed = container.exec("sh", "-c", PORTRAIT).lines
        seen[handler] = [executed, _read_to_end(container)]
    assert seen["nvidia"] == seen["runc"]
    assert seen["plain"] == seen["runc"]


def test_many_pods_at_once(pods: Pods) -> None:
    def whole_life(number: int) -> tuple[int, str]:
        pod = pods.run()
        container = pod.run("sh", "-c", f"echo {number}; exit {number}")
        seen = container.status.exit_code, container.output().strip()
        pod.remove()
        return seen

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(whole_life, range(10))) == [(n, str(n)) for n in range(10)]
    assert pods.ids() == []


def test_what_cannot_be_run_is_one_readable_line_and_leaves_the_pod_well(pods: Pods) -> None:
    pod = pods.run()
    with pytest.raises(CriRefused, match="no-such-image"):
        pod.create("true", image="nvshim.local/no-such-image:latest")
    container = pod.create("/no/such/program")
    with pytest.raises(
        CriRefused, match=r"/no/such/program.*([Nn]o such file|not found)"
    ) as refused:
        container.start()
    assert "\n" not in refused.value.said
    status = container.status
    assert (container.state, status.exit_code) == ("EXITED", 128)
    assert (status.reason, "/no/such/program" in status.message) == ("StartError", True)
    container.remove()
    assert pod.is_ready
    assert pod.run("true").status.exit_code == 0


def test_pod_that_cannot_be_run_is_one_readable_line_and_leaves_nothing(pods: Pods) -> None:
    with pytest.raises(CriRefused, match=r"no.such.setting") as refused:
        pods.run(sysctls={"net.no.such.setting": "1"})
    assert "\n" not in refused.value.said
    with pytest.raises(CriRefused, match="no-such-handler"):
        pods.run(handler="no-such-handler")
    assert pods.ids() == []


def test_server_knows_the_handler_as_the_readme_configures_it(pods: Pods) -> None:
    answer = pods.cri.status(pb.StatusRequest(verbose=True))
    assert {c.type: c.status for c in answer.status.conditions}["RuntimeReady"]
    assert {c.type: c.status for c in answer.status.conditions}["NetworkReady"]
    runtimes = json.loads(answer.info["config"])["containerd"]["runtimes"]
    assert runtimes["nvidia"]["runtimeType"] == "io.containerd.nvidia.v1"
    assert runtimes["nvidia"]["options"]["SystemdCgroup"] is False


@pytest.mark.parametrize("handler", ["crun", "crun by file"])
def test_handler_with_crun_and_other_options(pods: Pods, handler: str) -> None:
    if handler == "crun" and pods.containerd.parts.version < (1, 7):
        pytest.skip("containerd 1.6 passes only the path of an options file")
    pod = pods.run(handler=handler)
    container = pod.start("sh", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done")
    assert container.exec("sh", "-c", "echo in; exit 3").stdout == "in\n"
    eventually(lambda: container.output() == "up\n", "the container has set its trap")
    with open(f"{container.bundle}/options.json") as file:
        assert os.path.basename(json.load(file)["binary"]) == "crun"
    container.stop(grace=10)
    assert container.exit_code() == 7


def test_what_happens_to_containers_is_told_as_events(pods: Pods) -> None:
    if pods.containerd.parts.version < (1, 7):
        with pytest.raises(grpc.RpcError, match="GetContainerEvents"):
            next(_events(pods.cri, 20))
        return
    seen: list[tuple[str, int]] = []

    def listen(cri: Cri) -> None:
        with suppress(grpc.RpcError):  # the stream is closed at the end
            for event in _events(cri, 40):
                seen.append((event.container_id, event.container_event_type))  # noqa: PERF401 - one by one

    def is_heard() -> bool:
        # Only an event shows that the subscription is active.
        pods.run().remove()
        return bool(seen)

    with Cri(pods.containerd.address) as cri:
        thread = Thread(target=listen, args=(cri,))
        thread.start()
        eventually(is_heard, "an event arrives")
        pod = pods.run()
        container = pod.run("true")
        # Different parts of containerd report an exit and a removal, so their order is not fixed.
        eventually(lambda: (container.id, pb.CONTAINER_STOPPED_EVENT) in seen, "the exit event")
        pod.stop()
        eventually(lambda: (pod.id, pb.CONTAINER_STOPPED_EVENT) in seen, "the pod's exit event")
        pod.remove()
        eventually(lambda: (pod.id, pb.CONTAINER_DELETED_EVENT) in seen, "the last event")
    thread.join(20)
    ids = (pod.id, container.id)
    own = {i: [kind for who, kind in seen if who == i] for i in ids}
    life = [pb.CONTAINER_CREATED_EVENT, pb.CONTAINER_STARTED_EVENT, pb.CONTAINER_STOPPED_EVENT,
            pb.CONTAINER_DELETED_EVENT]  # fmt: skip
    assert own == {pod.id: life, container.id: life}


def _events(cri: Cri, timeout: float) -> Iterator[pb.ContainerEventResponse]:
    """Yield the container events that arrive within ``timeout`` seconds."""
    call = cri.channel.unary_stream(
        f"/{pb.DESCRIPTOR.package}.RuntimeService/GetContainerEvents",
        request_serializer=pb.GetEventsRequest.SerializeToString,
        response_deserializer=pb.ContainerEventResponse.FromString,
    )
    yield from call(pb.GetEventsRequest(), timeout=timeout)


def _read_to_end(container: PodContainer) -> list[str]:
    eventually(lambda: "end of it" in container.output(), "the last line")
    return container.output().splitlines()


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
