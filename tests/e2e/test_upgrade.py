"""Replace containerd by another release in the same directories, under running containers.

The new containerd adopts a shim that the old one has started, whose protocol version may differ.
The downgrade is tested too. containerd's own shim does not support it: a shim that 2.x has started
speaks only version 3, and it does not keep an exited task either.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from tests.conftest import LOW_LEVEL, PARTS, RUNTIME
from tests.harness.containerds import containerd_with_images, nothing_left
from tests.harness.events import Recorder
from tests.harness.releases import of_releases
from tests.harness.runtime import OURS, Container, Runtime, is_alive, new_name, remove_fifos
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd
from tools.images import busybox
from tools.parts import INSTALLED, Parts

GROUP: Final = "io.containerd.runc.v2.group"

# The old and the new release, and how the old one stops. Debian 12 has containerd 1.6, 13 has
# 1.7, sid has 2.x.
EXCHANGES: Final = (
    ("installed", "trixie", "kill"),
    ("trixie", "sid", "stop"),
    ("trixie", "sid", "kill"),
    ("installed", "sid", "stop"),
    ("sid", "trixie", "stop"),
)

# Exits with 17 when the test creates a file in the container.
UNTIL_TOLD: Final = ("sh", "-c", "until test -e /tmp/end; do sleep 0.02; done; exit 17")


pytestmark = pytest.mark.skipif(
    (PARTS, LOW_LEVEL) != (INSTALLED, "runc"), reason="chooses its parts itself"
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """How containerd is replaced."""

    before: Parts  # the first one
    after: Parts  # the second one
    way: str  # how the first one stops: "stop" or "kill"

    def __call__(self, containerd: PrivateContainerd, *, meanwhile: Callable[[], object]) -> None:
        """Replace it.

        Args:
            containerd: a running one; the new one runs afterwards.
            meanwhile: called while none runs.
        """
        getattr(containerd, self.way)()
        meanwhile()
        containerd.parts = self.after
        containerd.start()


@pytest.fixture(params=of_releases(*EXCHANGES), ids="-".join)
def exchange(request: pytest.FixtureRequest) -> Exchange:
    before, after, way = request.param
    if RUNTIME != OURS and (before, after) == ("sid", "trixie"):
        pytest.skip("containerd's own shim of 2.x does not speak with 1.7")
    return Exchange(Parts.named(before), Parts.named(after), way)


@pytest.fixture
def containerd(
    exchange: Exchange, shim_directory: str, shim_config: str
) -> Iterator[PrivateContainerd]:
    """Return a containerd of the old release."""
    with (
        containerd_with_images(
            exchange.before, [busybox()], shim_directory=shim_directory, shim_config=shim_config
        ) as containerd,
        nothing_left(containerd),
    ):
        yield containerd


@pytest.fixture
def runtime(containerd: PrivateContainerd) -> Iterator[Runtime]:
    """Return the runtime under test."""
    runtime = Runtime(containerd, RUNTIME)
    yield runtime
    if not containerd.pid:
        containerd.start()
    runtime.close()
    remove_fifos(containerd)


def test_containers_outlive_the_exchange_of_their_containerd(
    runtime: Runtime, exchange: Exchange
) -> None:
    containerd = runtime.containerd
    pod = ("--annotation", f"{GROUP}={new_name('pod')}")
    single = runtime.start(*UNTIL_TOLD)
    members = [runtime.start(*UNTIL_TOLD, flags=pod) for _ in range(2)]
    paused = runtime.start_idle()
    containerd.ctr("tasks", "pause", paused.name)
    ended = runtime.start("sh", "-c", "exit 9")
    ended.wait_for("STOPPED")
    ending = runtime.start(*UNTIL_TOLD)
    inits = {container.name: container.pid for container in (single, *members, paused, ending)}
    shims = containerd.shim_pids()

    def end_one() -> None:
        _tell(inits[ending.name])
        eventually(lambda: not is_alive(inits[ending.name]), "one has exited meanwhile")

    exchange(containerd, meanwhile=end_one)
    if runtime.is_ours:
        assert containerd.shim_pids() == shims
        assert ended.exit_code() == 9
        assert ending.exit_code() == 17
    with Recorder(containerd) as recorder:
        for container in (single, *members):
            assert (container.pid, container.status) == (inits[container.name], "RUNNING")
            done = container.exec("sh", "-c", "echo out; echo err >&2; exit 5")
            assert (done.stdout, done.stderr, done.code) == ("out\n", "err\n", 5)
            assert inits[container.name] in container.pids
        assert paused.status == "PAUSED"
        containerd.ctr("tasks", "resume", paused.name)
        paused.kill("KILL")
        _joins(runtime, members[0], pod)
        for container in (single, *members):
            _tell(inits[container.name])
            assert container.exit_code() == 17
            assert _told_of_its_end(recorder, container)
        assert paused.exit_code() == 128 + 9
    eventually(lambda: not any(map(is_alive, shims)), "the shims have exited")


@pytest.mark.parametrize(
    "exchange",
    of_releases(
        ("installed", "trixie", "kill"), ("trixie", "sid", "kill"), ("sid", "trixie", "stop")
    ),
    ids="-".join,
    indirect=True,
)
def test_killed_shims_of_a_containerd_that_is_gone_are_cleaned_up(
    runtime: Runtime, exchange: Exchange
) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim does not remove the socket of a killed one")
    containerd = runtime.containerd
    pod = ("--annotation", f"{GROUP}={new_name('pod')}")
    before, after = runtime.start_idle(), runtime.start_idle()
    members = [runtime.start_idle(flags=pod) for _ in range(2)]
    inits = {container.name: container.pid for container in (before, after, *members)}

    def kill_shim(container: Container) -> None:
        os.kill(_parent(inits[container.name]), signal.SIGKILL)

    exchange(containerd, meanwhile=lambda: kill_shim(before))
    _wait_until_cleaned(before, inits[before.name])
    for container in (after, members[0]):
        assert container.status == "RUNNING"
        kill_shim(container)
    for container in (after, *members):
        _wait_until_cleaned(container, inits[container.name])


def _tell(pid: int) -> None:
    with open(f"/proc/{pid}/root/tmp/end", "w"):
        pass


def _wait_until_cleaned(container: Container, init: int) -> None:
    eventually(lambda: not is_alive(init), "init is dead")
    eventually(lambda: container.status in {"", "STOPPED"}, "containerd knows")
    bundle = container.runtime.containerd.bundle(container.name)
    eventually(lambda: not os.path.exists(bundle), "the bundle is gone")


def _joins(runtime: Runtime, member: Container, pod: tuple[str, str]) -> None:
    """Check that a new container joins the pod's shim."""
    shims = runtime.containerd.shim_pids()
    late = runtime.start_idle(flags=pod)
    assert runtime.containerd.shim_pids() == shims
    assert _parent(late.pid) == _parent(member.pid)
    assert late.exec("echo", "here").stdout == "here\n"
    late.kill("KILL")
    assert late.exit_code() == 128 + 9


def _told_of_its_end(recorder: Recorder, container: Container) -> bool:
    """Whether its exit arrived once, followed by its deletion."""
    names = recorder.wait_for(container.name, lambda names: "delete" in names)
    return [name for name in names if name in {"exit", "delete"}] == ["exit", "delete"]


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
