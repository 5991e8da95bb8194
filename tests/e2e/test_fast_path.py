"""The fast path leaves the same state as the call of runc or crun that it replaces.

Each test runs the same containers twice: with every runtime call made, and with the fast path. The
client's answers, the machine's state afterwards, and the runtime's own answers in between must not
differ. The test removes the runtime to show that no call was made.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from api import typeurl
from api.proto import runc_options_pb2
from api.ttrpc import RemoteError
from integration.timeouts import PATIENCE
from tests.conftest import PARTS
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.shim import CGROUP, LIFE, RUNC_ROOT, ShimByHand, StartShim, gone
from tools.parts import INSTALLED, Parts

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(PARTS != INSTALLED, reason="chooses its runtimes itself"),
]

WITHOUT: Final = {"NVSHIM_STAND_INS": "0"}


# On an emulated machine one container takes minutes, so test one of each there.
_PROGRAMS: Final = (
    ["runc trixie", "crun installed"]
    if "NVSHIM_TEST_VM" in os.environ
    else [
        f"{runtime} {release}"
        for runtime in ("runc", "crun")
        for release in ("installed", "trixie", UNSTABLE)
    ]
)


@pytest.fixture(params=of_releases(*_PROGRAMS))
def program(request: pytest.FixtureRequest) -> str:
    """Return a runc or a crun, in every available version."""
    runtime, release = request.param.split()
    return str(getattr(Parts.named(release), runtime))


@dataclass
class Lives:
    """A shim that runs containers with one runtime, and a record of what was seen of them."""

    shim: ShimByHand
    program: str
    seen: list[Any] = field(default_factory=list)

    async def create(self, container_id: str, *args: str, **spec: Any) -> None:
        rootfs = os.path.join(self.shim.directory, "c0", "rootfs")
        if container_id != "c0":
            shared_pids = spec.pop("shared_pids", False)
            self.shim.bundle(container_id, *args, shared_pids=shared_pids, rootfs=rootfs)
        _add_rubbish(os.path.join(rootfs, "bin"))
        document = self.shim.spec(container_id)
        document.update(spec)
        self.shim.write_spec(container_id, document)
        options = typeurl.pack(runc_options_pb2.Options(binary_name=self.program))
        await self.shim.create(container_id, options=options)
        self.look(container_id)

    async def call(self, method: str, container_id: str, **fields: Any) -> Any:
        """Call a method, and record the result."""
        try:
            answer = await self.shim.call(method, id=container_id, **fields)
        except RemoteError as error:
            said = re.sub(r"\d+", "N", str(error))
            self.seen.append((container_id, method, int(error.status), said))
            return None
        self.seen.append((container_id, method, getattr(answer, "exit_status", None)))
        return answer

    def look(self, container_id: str) -> None:
        """Record the runtime's state files and its own answer about a container."""
        directory = os.path.join(RUNC_ROOT, container_id)
        files = sorted(os.listdir(directory)) if os.path.isdir(directory) else None
        said = self.by_hand("state", container_id)
        status = json.loads(said.stdout)["status"] if said.returncode == 0 else "none"
        self.seen.append((container_id, files, status))

    def by_hand(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call the runtime as an operator would, on the host that the shim sees."""
        argv = ["nsenter", "--mount", f"--target={self.shim.pid}", self.program]
        return subprocess.run(
            [*argv, "--root", RUNC_ROOT, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=20 * PATIENCE,
        )

    async def end(self, *container_ids: str) -> None:
        """Record the events of deleted containers, and what they leave."""
        await self.shim.events.until("TaskDelete", count=len(container_ids))
        for container_id in container_ids:
            self.look(container_id)
            self.seen.append((container_id, self.shim.events.of(container_id)))
        ours = ("socket ", "process ")  # the shim's, which lives on
        self.seen.append([left for left in self.shim.leftovers() if not left.startswith(ours)])
        await gone(self.shim, container_ids[0])


async def _both_ways(
    start_shim: StartShim,
    program: str,
    live: Callable[[Lives], Awaitable[None]],
    *args: str,
) -> list[Any]:
    """Run the containers in both ways; return the record, which must be the same."""
    seen = []
    for environment in (WITHOUT, {}):
        for_crun = os.path.basename(program) == "crun"
        async with start_shim("c0", *args, environment=environment, for_crun=for_crun) as shim:
            lives = Lives(shim, program)
            await live(lives)
            seen.append(lives.seen)
    assert seen[1] == seen[0]
    return seen[1]


async def test_lives_go_and_leave_the_same_as_with_every_call(
    start_shim: StartShim, program: str
) -> None:
    async def live(lives: Lives) -> None:
        # A container that exits soon.
        await lives.create("c0")
        await lives.call("Start", "c0")
        await lives.call("Wait", "c0")
        await lives.call("Delete", "c0")
        # A container that is queried with the runtime, and killed.
        await lives.create("c1", "sleep", "1000")
        await lives.call("Start", "c1")
        lives.look("c1")
        await lives.call("Start", "c1")
        assert lives.by_hand("exec", "c1", "true").returncode == 0
        assert "c1" in lives.by_hand("list").stdout
        await lives.call("Kill", "c1", signal=signal.SIGWINCH)
        lives.look("c1")
        assert lives.by_hand("kill", "c1", "KILL").returncode == 0
        await lives.call("Wait", "c1")
        await lives.call("Kill", "c1", signal=signal.SIGKILL)
        await lives.call("Delete", "c1")
        # A container that is frozen when it is killed; only the runtime knows that.
        await lives.create("c6", "sleep", "1000")
        await lives.call("Start", "c6")
        assert lives.by_hand("pause", "c6").returncode == 0
        await lives.call("Kill", "c6", signal=signal.SIGKILL)
        lives.by_hand("resume", "c6")
        await lives.call("Wait", "c6")
        await lives.call("Delete", "c6")
        # A container that is frozen before its start, which runc refuses and crun allows.
        await lives.create("c7", "sleep", "1000")
        assert lives.by_hand("pause", "c7").returncode == 0
        await lives.call("Start", "c7")
        assert lives.by_hand("resume", "c7").returncode == 0
        lives.look("c7")
        await lives.call("Kill", "c7", signal=signal.SIGKILL)
        await lives.call("Wait", "c7")
        await lives.call("Delete", "c7")
        # A container that is never started.
        await lives.create("c2", "true")
        await lives.call("Delete", "c2")
        # A container whose init dies before its start.
        await lives.create("c3", "true")
        await lives.call("Kill", "c3", signal=signal.SIGKILL)
        await lives.call("Wait", "c3")
        await lives.call("Start", "c3")
        await lives.call("Delete", "c3")
        # A program that cannot be executed, and processes that outlive init.
        await lives.create("c4", "/bin/no-program")
        await lives.call("Start", "c4")
        await lives.call("Wait", "c4")
        await lives.call("Delete", "c4")
        await lives.create("c5", "sh", "-c", "sleep 1000 & sleep 1000 & exit 5", shared_pids=True)
        await lives.call("Start", "c5")
        await lives.call("Wait", "c5")
        await lives.call("Delete", "c5")
        await lives.end("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")

    seen = await _both_ways(start_shim, program, live, "sh", "-c", "exit 7")
    assert ("c0", "Wait", 7) in seen
    assert any(entry[0] == "c1" and entry[2] == "running" for entry in seen if len(entry) == 3)
    assert ("c0", LIFE) in seen
    assert ("c5", LIFE) in seen
    assert [] in seen  # left on the machine


async def test_hooks_are_run_as_often_and_in_the_same_order(
    start_shim: StartShim, program: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    runs = []

    async def live(lives: Lives) -> None:
        told.write_text("")
        # The hooks read the state from stdin: otherwise a broken pipe kills crun.
        hooks = {
            kind: [
                {"path": "/bin/sh", "args": ["sh", "-c", f"cat > /dev/null; echo {kind} >> {told}"]}
            ]
            for kind in ("poststart", "poststop")
        }
        await lives.create("c0", hooks=hooks)
        for method in ("Start", "Wait", "Delete"):
            await lives.call(method, "c0")
        await lives.end("c0")
        runs.append(told.read_text().split())

    await _both_ways(start_shim, program, live, "true")
    assert runs == [["poststart", "poststop"]] * 2


async def test_the_runtime_is_not_needed_any_more_once_it_has_made_the_container(
    start_shim: StartShim, program: str, tmp_path: Path
) -> None:
    name = os.path.basename(program)
    copy = str(tmp_path / name)
    shutil.copy2(program, copy)
    async with start_shim("c0", "sleep", "1000", for_crun=name == "crun") as shim:
        lives = Lives(shim, copy)
        await lives.create("c0")
        os.unlink(copy)
        await shim.call("Start", id="c0")
        await shim.call("Kill", id="c0", signal=signal.SIGKILL)
        assert await shim.reap("c0") == 137
        assert not any("without the runtime" in line for line in await shim.log_lines("c0"))
        await shim.events.until("TaskDelete")
        assert shim.events.of("c0") == LIFE


async def test_a_wrapper_of_a_runtime_is_called_for_everything(
    start_shim: StartShim, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    wrapper = tmp_path / "runc"
    wrapper.write_text(f'#!/bin/sh\necho "$7" >> {calls}\nexec runc "$@"\n')
    wrapper.chmod(0o755)
    async with start_shim("c0", "true") as shim:
        options = typeurl.pack(runc_options_pb2.Options(binary_name=str(wrapper)))
        await shim.create("c0", options=options)
        for method in ("Start", "Wait", "Delete"):
            await shim.call(method, id="c0")
        assert calls.read_text().split() == ["create", "start", "delete"]


async def test_one_that_a_person_starts_and_one_in_a_busy_cgroup_are_the_runtime_s(
    start_shim: StartShim, program: str
) -> None:
    async def live(lives: Lives) -> None:
        await lives.create("c0")
        assert lives.by_hand("start", "c0").returncode == 0
        await lives.call("Start", "c0")
        await lives.call("Kill", "c0", signal=signal.SIGKILL)
        await lives.call("Wait", "c0")
        await lives.call("Delete", "c0")
        # A cgroup that the container created, as nested runtimes leave them.
        await lives.create("c1", "sleep", "1000")
        await lives.call("Start", "c1")
        for directory in _cgroups_of("c1"):
            os.makedirs(os.path.join(directory, "inner", "most"))
        await lives.call("Kill", "c1", signal=signal.SIGKILL)
        await lives.call("Wait", "c1")
        await lives.call("Delete", "c1")
        await lives.end("c0", "c1")

    await _both_ways(start_shim, program, live, "sleep", "1000")


async def test_an_init_that_stands_still_is_waited_for_and_let_go_when_killed(
    start_shim: StartShim,
) -> None:
    async with start_shim("c0", "true") as shim:
        lives = Lives(shim, Parts.installed().runc)
        await lives.create("c0")
        pid = (await shim.call("State", id="c0")).pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Exception, match="deadline"):
            await shim.call("Start", id="c0", timeout=0.5)
        os.kill(pid, signal.SIGKILL)
        assert (await shim.call("Wait", id="c0")).exit_status == 137
        with anyio.fail_after(10 * PATIENCE):
            await shim.call("Delete", id="c0")
        assert "TaskStart" not in shim.events.of("c0")


def _add_rubbish(directory: str) -> None:
    """Add an executable file that the kernel cannot execute."""
    path = os.path.join(directory, "no-program")
    with open(path, "wb") as file:
        file.write(b"\0" * 64)
    os.chmod(path, 0o755)


def _cgroups_of(container_id: str) -> list[str]:
    found = glob.glob(f"/sys/fs/cgroup/*{CGROUP}/{container_id}")
    found += glob.glob(f"/sys/fs/cgroup{CGROUP}/{container_id}")
    assert found
    # Each only once: with systemd, cpu and cpuacct are links to one hierarchy.
    return sorted(set(map(os.path.realpath, found)))
