"""The traces of a containerd are found from outside, but not those of others."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.containers import traces
from integration.containers.traces import Marks, Trace
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd
from tools.cri.plugin import CriContainerd, CriPlugin


@pytest.fixture
def containerd(tmp_path: Path) -> Iterator[PrivateContainerd]:
    """Make a containerd that is not started; the tests create its traces."""
    containerd = PrivateContainerd(str(tmp_path / "containerd"))
    yield containerd
    containerd.remove()


def _found(containerd: PrivateContainerd) -> set[tuple[str, str]]:
    return {(trace.kind, trace.name) for trace in traces.find(containerd.marks)}


def _sleep(*, cwd: str = "/", env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sleep", "1000"], cwd=cwd, env=env or {})


def test_nothing_is_found_where_nothing_is(containerd: PrivateContainerd) -> None:
    assert traces.find(containerd.marks) == set()


def test_an_argument_of_ctr_need_not_be_text(containerd: PrivateContainerd) -> None:
    """Any of them may be the name of a container, whose socket is looked for."""
    containerd.ctr_argv("run", "\udcff")
    assert traces.find(containerd.marks) == set()


def test_process_is_known_by_its_directory(containerd: PrivateContainerd) -> None:
    with _sleep(cwd=containerd.directory) as process:
        assert _found(containerd) == {("process", str(process.pid))}
        assert containerd.sweep() == set()
    assert process.returncode == -9


def test_process_is_known_by_its_environment(containerd: PrivateContainerd) -> None:
    with _sleep(env={"TTRPC_ADDRESS": containerd.ttrpc_address}) as process:
        assert _found(containerd) == {("process", str(process.pid))}
        containerd.sweep()
    assert process.returncode == -9


def test_process_is_known_by_its_arguments_and_its_child_by_the_parent(
    containerd: PrivateContainerd,
) -> None:
    script = "sleep 1000 & echo $!; while :; do wait; done"  # it never exits by itself
    argv = ["/bin/sh", "-c", script, "-namespace", containerd.namespace]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={"PATH": "/bin"}) as process:
        assert process.stdout is not None
        child = process.stdout.readline().decode().strip()
        assert _found(containerd) == {("process", str(process.pid)), ("process", child)}
        containerd.sweep()
    assert process.returncode == -9


def test_process_of_somebody_else_is_left_alone(containerd: PrivateContainerd) -> None:
    other = f"{containerd.namespace}-not"
    with _sleep(env={"NAMESPACE": other}) as process:
        assert _found(containerd) == set()
        containerd.sweep()
        assert process.poll() is None
        process.kill()


def test_process_is_known_by_its_cgroup_and_the_cgroup_goes_with_it(
    containerd: PrivateContainerd,
) -> None:
    hierarchy = next(
        path for path in traces.cgroup_hierarchies() if path.endswith(("pids", "cgroup"))
    )
    directory = os.path.join(hierarchy, containerd.namespace, "container")
    os.makedirs(directory)
    with _sleep() as process:
        with open(os.path.join(directory, "cgroup.procs"), "w") as file:
            file.write(str(process.pid))
        assert _found(containerd) == {("process", str(process.pid)), ("cgroup", directory)}
        process.kill()
        process.wait()
        assert _found(containerd) == {("cgroup", directory)}
        assert containerd.sweep() == set()
    assert not os.path.exists(directory)


def test_zombie_is_its_parents(containerd: PrivateContainerd) -> None:
    script = "echo $$; (exit 0) & exec sleep 1000"
    argv = ["/bin/sh", "-c", script]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, cwd=containerd.directory, env={"PATH": "/bin"}
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        zombie = f"zombie of {process.pid}"
        eventually(lambda: zombie in [t.detail for t in traces.find(containerd.marks)], zombie)
        process.kill()


def test_mount_is_found_and_unmounted(containerd: PrivateContainerd) -> None:
    point = os.path.join(containerd.directory, "a mount")
    os.mkdir(point)
    subprocess.run(["mount", "-t", "tmpfs", "none", point], check=True)
    subprocess.run(["mount", "--bind", point, point], check=True)
    assert _found(containerd) == {("mount", point)}
    assert containerd.sweep() == set()
    assert not os.path.ismount(point)


def test_bind_mount_elsewhere_of_a_file_below_the_directory_is_found(
    containerd: PrivateContainerd, tmp_path: Path
) -> None:
    source = os.path.join(containerd.directory, "inner")
    point = tmp_path / "outside"
    os.mkdir(source)
    point.mkdir()
    subprocess.run(["mount", "--bind", source, str(point)], check=True)
    assert ("mount", str(point)) in _found(containerd)
    containerd.sweep()
    assert not os.path.ismount(point)


def test_sockets_are_found_by_the_names_that_were_used(containerd: PrivateContainerd) -> None:
    name = f"c-{uuid.uuid4()}"
    path = traces.socket_path(containerd.marks, name)
    os.makedirs(os.path.dirname(path), mode=0o711, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        assert _found(containerd) == set()
        containerd.ctr_argv("run", "image", name)
        assert _found(containerd) == {("socket", path)}
        assert containerd.sweep() == set()
    assert not os.path.exists(path)


def test_socket_of_a_pod_is_found_by_its_annotation(containerd: PrivateContainerd) -> None:
    pod = f"pod-{uuid.uuid4()}"
    containerd.ctr_argv("run", "--annotation", f"io.containerd.runc.v2.group={pod}", "image", "c")
    assert pod in containerd.marks.names


def test_socket_has_the_name_that_shims_give_it() -> None:
    marks = Marks("/d", "/d/containerd.sock", "ns")
    # sha256 of /d/containerd.sock/ns/c1
    assert traces.socket_path(marks, "c1") == (
        "/run/containerd/s/90e1b388bf293d00717f7de208ea4b8453f83f124d815e240a2576072042a33c"
    )


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("bundle", "state/io.containerd.runtime.v2.task/{ns}/c1"),
        ("bundle", "root/io.containerd.runtime.v2.task/{ns}/c1"),
        ("runtime state", "runc/{ns}/c1"),
        ("file", "tmp/runc-process1"),
    ],
)
def test_directories_of_a_container_are_found_and_removed(
    containerd: PrivateContainerd, kind: str, path: str
) -> None:
    directory = os.path.join(containerd.directory, path.format(ns=containerd.namespace))
    os.makedirs(os.path.join(directory, "inner"))
    assert _found(containerd) == {(kind, directory)}
    assert containerd.sweep() == set()
    assert not os.path.exists(directory)


def test_fifo_is_found_and_removed(containerd: PrivateContainerd) -> None:
    directory = os.path.join(containerd.fifo_directory, "123")
    os.makedirs(directory)
    os.mkfifo(os.path.join(directory, "c1-stdout"))
    assert _found(containerd) == {("fifo", os.path.join(directory, "c1-stdout"))}
    assert containerd.sweep() == set()


def test_trace_reads_like_a_sentence() -> None:
    assert str(Trace("mount", "/a", "tmpfs from none")) == "mount /a (tmpfs from none)"
    assert str(Trace("socket", "/a")) == "socket /a"


def test_what_the_cri_leaves_is_found_by_its_ids_and_removed(containerd: PrivateContainerd) -> None:
    pod, other = uuid.uuid4().hex * 2, uuid.uuid4().hex * 2
    with open(containerd.log_path, "w") as file:
        file.write(f"RunPodSandbox returns sandbox id {pod}\nand a line that is not whole {other}")
    containerd = CriContainerd(containerd.directory, cri=CriPlugin({}, sandbox_image="none"))
    directory = containerd.directory
    hierarchy = traces.cgroup_hierarchies()[-1]
    expected = {
        ("cgroup", f"{hierarchy}/k8s.io/{pod}"),
        ("runtime state", f"{traces.RUNTIME_STATE}/k8s.io/{pod}"),
        ("bundle", f"{directory}/state/io.containerd.runtime.v2.task/k8s.io/{pod}"),
        ("pod", f"{directory}/root/io.containerd.grpc.v1.cri/sandboxes/{pod}"),
        ("pod", f"{directory}/state/io.containerd.grpc.v1.cri/netns/cni-1"),
        ("pod", f"{directory}/cni/addresses/nv1/10.213.0.2"),
        ("pod", f"/var/lib/cni/results/nv1-{pod}-eth0"),
    }
    foreign = [f"{hierarchy}/k8s.io/{other}", f"{traces.RUNTIME_STATE}/k8s.io/{other}"]
    try:
        for path in [*(path for _, path in expected), *foreign]:
            os.makedirs(path)
        assert _found(containerd) == expected
        assert containerd.sweep() == set()
        assert all(os.path.isdir(path) for path in foreign)
    finally:
        for path in foreign:
            os.rmdir(path)
            with contextlib.suppress(OSError):  # others may have pods
                os.rmdir(os.path.dirname(path))
