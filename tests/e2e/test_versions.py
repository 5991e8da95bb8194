"""The core features on other containerds and low-level runtimes than the installed ones.

A few tests that each cover much; ``make test-matrix`` runs all tests on all versions.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from integration.simulated import SimulatedNode
from tests.conftest import LOW_LEVEL, PARTS, RUNTIME
from tests.harness import api
from tests.harness.containerds import containerd_with_images
from tests.harness.events import Recorder
from tests.harness.low_level import crun_for_this_host
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.runtime import (
    NO_SUCH_PROGRAM,
    Runtime,
    is_alive,
    new_name,
    one_line,
    remove_fifos,
)
from tests.harness.terminal import Terminal
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd
from tools.images import GLIBC, busybox, glibc
from tools.parts import INSTALLED, Parts

GROUP: Final = "io.containerd.runc.v2.group"

pytestmark = pytest.mark.skipif(
    (PARTS, LOW_LEVEL) != (INSTALLED, "runc"), reason="chooses its parts itself"
)


@pytest.fixture(scope="module", params=of_releases("trixie", UNSTABLE))
def session_containerd(
    request: pytest.FixtureRequest, shim_directory: str, shim_config: str
) -> Iterator[PrivateContainerd]:
    """Return a containerd of each release instead of the session's.

    Debian 13 has containerd 1.7, unstable has 2.x; both have a newer crun than the installed one.
    """
    with containerd_with_images(
        Parts.of_release(request.param),
        [busybox(), glibc()],
        shim_directory=shim_directory,
        shim_config=shim_config,
    ) as containerd:
        yield containerd


@pytest.fixture(params=["runc", "crun"])
def either(
    request: pytest.FixtureRequest, containerd: PrivateContainerd, workshop: str
) -> Iterator[Runtime]:
    """Return the runtime under test, with each low-level runtime of the release."""
    crun = containerd.parts.crun
    low_level = crun_for_this_host(workshop, crun) if request.param == "crun" else None
    runtime = Runtime(containerd, RUNTIME, low_level)
    yield runtime
    runtime.close()


def test_container_runs_to_its_end_with_its_output_and_its_exit_code(either: Runtime) -> None:
    done = either.run("sh", "-c", "read -r l; echo $l; echo err >&2; exit 42", stdin="in\n")
    assert (done.stdout, done.stderr, done.code) == ("in\n", "err\n", 42)
    done = either.run("no-such-program")
    assert done.code == 1
    assert NO_SUCH_PROGRAM.search(done.stderr)
    assert one_line(done)
    if either.is_ours:
        assert "NVSHIM-E" in done.stderr


def test_container_is_watched_stopped_and_told_of(either: Runtime) -> None:
    containerd = either.containerd
    with Recorder(containerd) as recorder:
        container = either.start_idle()
        assert container.status == "RUNNING"
        assert container.pid in container.pids
        done = container.exec("sh", "-c", "read -r l; echo $l; echo err >&2; exit 7", stdin="in\n")
        assert (done.stdout, done.stderr, done.code) == ("in\n", "err\n", 7)
        assert container.exec("no-such-program").code == 1
        containerd.ctr("tasks", "pause", container.name)
        assert container.status == "PAUSED"
        containerd.ctr("tasks", "resume", container.name)
        container.kill("KILL")
        assert container.exit_code() == 128 + 9
        # containerd 2.x's own shim sometimes exits before it has sent the delete event.
        last = "delete" if either.is_ours else "exit"
        names = recorder.wait_for(container.name, lambda names: last in names)
    told = [name for name in names if name in {"create", "start", "paused", "exit", last}]
    assert told == list(dict.fromkeys(("create", "start", "paused", "exit", last)))


def test_container_and_its_exec_have_terminals(either: Runtime) -> None:
    container = either.expect()
    words = either.words(
        "sh", "-c", "test -t 1; echo inside $?; read -r line; exit 3",
        image=GLIBC, name=container.name, flags=("--rm", "--tty"),
    )  # fmt: skip
    with Terminal(either.containerd.ctr_argv(*words)) as tty:
        tty.wait_for("inside 0\r\n")
        # Each waits for input: ctr fails if a process exits while ctr sets its size.
        words = container.exec_words(
            "sh", "-c", "test -t 0; echo exec $?; read -r line", flags=["--tty"]
        )
        with Terminal(either.containerd.ctr_argv(*words)) as exec_tty:
            exec_tty.wait_for("exec 0\r\n")
            exec_tty.type("end\n")
            assert exec_tty.wait() == 0
        tty.type("end\n")
        assert tty.wait() == 3


def test_granted_gpu_is_in_the_container_and_the_other_is_not(
    either: Runtime, configure: Callable[..., None], two_gpus: SimulatedNode
) -> None:
    if not either.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    configure(node=two_gpus)
    container = either.start_idle(image=GLIBC, flags=["--env", "NVIDIA_VISIBLE_DEVICES=1"])
    listed = container.exec("sh", "-c", "echo /dev/nvidia[0-9]*; : </dev/nvidia1")
    smi = container.exec("nvidia-smi", "-L")
    container.remove()
    assert listed.stdout == "/dev/nvidia1\n"
    # The node has no kernel module; the test checks that the cgroup allows opening it.
    assert "not permitted" not in listed.stderr
    assert smi.stdout.startswith("GPU 0: ")
    assert len(smi.lines) == 1


def test_pod_shares_a_shim_and_outlives_its_containerd(runtime: Runtime) -> None:
    containerd = runtime.containerd
    flags = ["--annotation", f"{GROUP}={new_name('pod')}"]
    first, second = (runtime.start_idle(flags=flags) for _ in range(2))
    (shim,) = containerd.shim_pids()
    inits = [first.pid, second.pid]
    containerd.restart()
    assert [first.pid, second.pid] == inits
    containerd.kill()
    if runtime.is_ours:  # containerd's own shim loses a task that exits meanwhile
        os.kill(inits[1], signal.SIGKILL)
        eventually(lambda: not is_alive(inits[1]), "the second has exited")
    containerd.start()
    assert containerd.shim_pids() == [shim]
    assert first.status == "RUNNING"
    assert first.exec("echo", "here").stdout == "here\n"
    if runtime.is_ours:
        assert second.exit_code() == 128 + 9
    third = runtime.start_idle(flags=flags)
    assert containerd.shim_pids() == [shim]
    for container in (first, second, third):
        container.remove()
    eventually(lambda: not is_alive(shim), "the shim exits")
    if not runtime.is_ours:  # of 2.x, it sometimes leaves its socket
        containerd.sweep()


def test_later_container_of_a_sandbox_for_which_start_is_not_called(runtime: Runtime) -> None:
    # containerd 1.7 connects it to the shim of the task with the sandbox's name. (2.x queries its
    # sandbox store, which the sandbox tests cover.)
    containerd = runtime.containerd
    if containerd.parts.version != (1, 7):
        pytest.skip("another version")
    sandbox, member = runtime.start_idle(), runtime.expect()
    (shim,) = containerd.shim_pids()
    spec = json.dumps({**runtime.spec("sleep", "1000"), "hostname": "member"}).encode()
    api.create_container(
        containerd, member.name, runtime=runtime.name, spec=spec, sandbox=sandbox.name
    )
    image = new_name("image")
    runtime.create_with_image(image, "true")
    api.create_task(containerd, member.name, mounts=runtime.prepare_rootfs(image))
    api.start_task(containerd, member.name)
    assert not os.path.lexists(os.path.join(containerd.bundle(member.name), "s"))
    assert containerd.shim_pids() == [shim]
    containerd.kill()
    containerd.start()
    assert member.exec("hostname").stdout == "member\n"
    member.kill("KILL")
    assert member.exit_code() == 128 + 9
    for name in (member.name, image):
        containerd.ctr("containers", "rm", name)
    assert sandbox.exec("echo", "here").stdout == "here\n"
    sandbox.remove()
    eventually(lambda: not is_alive(shim), "the shim exits")


def test_killed_shim_leaves_nothing_of_its_container(either: Runtime) -> None:
    if not either.is_ours:
        pytest.skip("containerd's own shim does not remove the socket of a killed one")
    container = either.start("sh", "-c", "sleep 1000 & sleep 1000")
    init = container.pid
    (shim,) = either.containerd.shim_pids()
    os.kill(shim, signal.SIGKILL)
    eventually(lambda: not is_alive(init), "init is dead")
    bundle = either.containerd.bundle(container.name)
    eventually(lambda: not os.path.exists(bundle), "the bundle is gone")
    container.remove()
    remove_fifos(either.containerd)
    assert either.run("echo", "again", name=container.name).stdout == "again\n"
