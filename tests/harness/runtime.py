"""A runtime of a containerd, and its containers, for tests.

Tests are written for any runtime, so that they can be validated with containerd's own shim: a test
that fails there expects something that a shim need not do.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from api.proto.task_types_pb2 import Status
from integration.containers import traces
from tests.harness import api
from tests.harness.waiting import eventually
from tools.containerd import Completed, PrivateContainerd
from tools.images import BUSYBOX

STOCK: Final = "io.containerd.runc.v2"
OURS: Final = "io.containerd.nvidia.v1"

# The errors of runc and crun for "no-such-program".
NO_SUCH_PROGRAM: Final = re.compile(
    r"""exec: "no-such-program": executable file not found in \$PATH"""
    r"""|executable file `no-such-program` not found in \$PATH"""
)

# Unique in a test run, so that a trace identifies the container of one test.
_numbers = itertools.count(1)

# The flags of ``ctr`` that choose a low-level runtime, or its root.
_CHOOSE_LOW_LEVEL: Final = frozenset({"--runtime-config-path", "--runc-binary", "--runc-root"})


def new_name(kind: str = "c") -> str:
    """Return a name that no container, exec or pod has had in this run."""
    return f"{kind}{next(_numbers)}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Container:
    """A detached container."""

    runtime: Runtime
    name: str  # its id

    @property
    def pid(self) -> int:
        """Return the pid of its init process from containerd; 0 if there is no task."""
        return self._task()[0]

    @property
    def status(self) -> str:
        """Return containerd's status: RUNNING, STOPPED, CREATED …, or "" if there is no task."""
        return self._task()[1]

    def exec(
        self, *command: str, flags: Iterable[str] = (), stdin: str = "", timeout: float = 60
    ) -> Completed:
        """Run a command in it until it exits; a non-zero code is not an error."""
        return self.runtime.containerd.ctr(
            *self.exec_words(*command, flags=flags), stdin=stdin, timeout=timeout, check=False
        )

    def exec_words(
        self, *command: str, flags: Iterable[str] = (), exec_id: str | None = None
    ) -> list[str]:
        """Return the arguments of ``ctr`` that run a command in it."""
        # A log replaces the fifos; ctr refuses both together.
        flags = tuple(flags)
        if "--log-uri" not in flags:
            flags = ("--fifo-dir", self.runtime.containerd.fifo_directory, *flags)
        return [
            "tasks", "exec", "--exec-id", exec_id or new_name("e"), *flags, self.name, *command,
        ]  # fmt: skip

    def kill(self, signal: str = "KILL", *, flags: Iterable[str] = ()) -> Completed:
        """Send a signal to its init, or to the processes that the flags choose."""
        return self.runtime.containerd.ctr(
            "tasks", "kill", "--signal", signal, *flags, self.name, check=False
        )

    def wait_for(self, status: str, *, timeout: float = 60) -> None:
        """Wait until containerd reports that state."""
        eventually(lambda: self.status == status, f"{self.name} is {status}", timeout=timeout)

    def delete_task(self) -> int:
        """Delete the task, and return its exit code from containerd."""
        return api.delete_task(self.runtime.containerd, self.name)

    def exit_code(self, *, timeout: float = 60) -> int:
        """Wait until it exits, delete the task, and return its exit code."""
        self.wait_for("STOPPED", timeout=timeout)
        return self.delete_task()

    @property
    def pids(self) -> list[int]:
        """Return the pids of its processes, as containerd lists them."""
        lines = self.runtime.containerd.ctr("tasks", "ps", self.name).lines[1:]
        return [int(line.split()[0]) for line in lines]

    def wait_for_program(self, name: str) -> int:
        """Wait until a program of that name runs in it, and return its pid."""

        def look() -> int:
            return next((pid for pid in self.pids if _program(pid) == name), 0)

        return eventually(look, f"{name} runs in {self.name}")

    def remove(self) -> None:
        """Kill it, delete its task, and remove it; parts that are gone already are no error."""
        api.remove_container(self.runtime.containerd, self.name)

    def _task(self) -> tuple[int, str]:
        task = api.tasks(self.runtime.containerd).get(self.name)
        return (task.pid, Status.Name(task.status)) if task is not None else (0, "")


class Runtime:
    """A runtime, and the containers that a test starts with it.

    Args:
        containerd: runs during the test.
        name: the runtime's name.
        low_level: the containers' default low-level runtime; None for the shim's own default.
    """

    def __init__(
        self, containerd: PrivateContainerd, name: str, low_level: str | None = None
    ) -> None:
        self.containerd = containerd
        self.name = name
        self.low_level = low_level
        self._containers: list[Container] = []

    @property
    def is_ours(self) -> bool:
        """Return whether it is our shim, and not containerd's own for comparison."""
        return self.name == OURS

    def words(
        self,
        *command: str,
        image: str = BUSYBOX,
        name: str | None = None,
        flags: Iterable[str] = (),
    ) -> list[str]:
        """Return the arguments of ``ctr`` that run a container."""
        flags = tuple(flags)
        return [
            "run", "--runtime", self.name, "--fifo-dir", self.containerd.fifo_directory,
            *self._default_low_level(flags), *flags, image, name or new_name(), *command,
        ]  # fmt: skip

    def run(
        self,
        *command: str,
        image: str = BUSYBOX,
        name: str | None = None,
        flags: Iterable[str] = (),
        stdin: str = "",
        timeout: float = 60,
    ) -> Completed:
        """Run a container until it exits and remove it; a non-zero code is not an error."""
        words = self.words(*command, image=image, name=name, flags=("--rm", *flags))
        return self.containerd.ctr(*words, stdin=stdin, timeout=timeout, check=False)

    def spawn(
        self,
        *command: str,
        image: str = BUSYBOX,
        name: str | None = None,
        flags: Iterable[str] = (),
        **options: Any,
    ) -> tuple[Container, subprocess.Popen[bytes]]:
        """Start a container with a ``ctr`` that stays attached to it."""
        container = self.expect(name)
        words = self.words(*command, image=image, name=container.name, flags=("--rm", *flags))
        return container, self.containerd.spawn_ctr(*words, **options)

    def start(
        self,
        *command: str,
        image: str = BUSYBOX,
        name: str | None = None,
        flags: Iterable[str] = (),
    ) -> Container:
        """Start a detached container. It is removed at the end of the test."""
        container = self.expect(name)
        self.containerd.ctr(
            *self.words(*command, image=image, name=container.name, flags=("--detach", *flags))
        )
        return container

    def start_idle(self, *, image: str = BUSYBOX, flags: Iterable[str] = ()) -> Container:
        """Start a container that does nothing until it is killed."""
        return self.start("sleep", "1000", image=image, flags=flags)

    def expect(self, name: str | None = None) -> Container:
        """Register a container that the test starts by other means. It is removed at the end."""
        container = Container(self, name or new_name())
        self._containers.append(container)
        return container

    def spec(
        self, *command: str, image: str = BUSYBOX, flags: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Return the OCI spec that ``ctr`` makes for a command in an image."""
        name = new_name()
        self.containerd.ctr("containers", "create", *flags, image, name, *command)
        try:
            info = json.loads(self.containerd.ctr("containers", "info", name).stdout)
        finally:
            self.containerd.ctr("containers", "rm", name)
        spec: dict[str, Any] = info["Spec"]
        spec["linux"]["cgroupsPath"] = f"/{self.containerd.namespace}/{name}"
        return spec

    def create_with_image(self, name: str, *command: str, image: str = BUSYBOX) -> None:
        """Create a container with a spec and a snapshot, but without a task."""
        self.containerd.ctr(
            "containers", "create", "--runtime", self.name, *self._default_low_level(()), image,
            name, *command,
        )  # fmt: skip

    def prepare_rootfs(self, name: str) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return the mounts of a container's snapshot: type, source and options of each."""
        text = self.containerd.ctr("snapshots", "mounts", "/target", name).stdout
        mounts = []
        for line in text.splitlines():
            # mount -t overlay overlay /target -o index=off,workdir=…
            words = line.split()
            mounts.append((words[2], words[3], tuple(words[words.index("-o") + 1].split(","))))
        return mounts

    def low_level_flags(
        self, directory: str, *, binary: str | None = None, root: str | None = None
    ) -> tuple[str, ...]:
        """Return the flags of ``ctr run`` that choose the low-level runtime and its root.

        ``ctr`` has such flags only for containerd's own shim. Other shims get a file, as from CRI.

        Args:
            directory: where that file is written.
            binary: the runtime's program; None for the shim's default.
            root: the directory of its state; None for the shim's default.
        """
        if not self.is_ours:
            chosen = (("--runc-binary", binary), ("--runc-root", root))
            return tuple(word for flag, value in chosen if value for word in (flag, value))
        path = os.path.join(directory, f"{new_name('options')}.toml")
        with open(path, "w", encoding="utf-8") as file:
            for key, value in (("BinaryName", binary), ("Root", root)):
                if value is not None:
                    file.write(f"{key} = {json.dumps(value)}\n")
        return ("--runtime-config-path", path)

    @property
    def maps_no_ids(self) -> bool:
        """Return whether containers cannot have mapped ids here.

        Options choose the low-level runtime, and containerd 2 takes any options for those of runc.
        """
        chosen = self.is_ours and self.low_level is not None
        return chosen and self.containerd.parts.version >= (2,)

    def _default_low_level(self, flags: Iterable[str]) -> tuple[str, ...]:
        if self.low_level is None or _CHOOSE_LOW_LEVEL.intersection(flags):
            return ()
        directory = os.path.join(self.containerd.directory, "options")
        os.makedirs(directory, exist_ok=True)
        return self.low_level_flags(directory, binary=self.low_level)

    def close(self) -> None:
        """Remove every container that the test started and did not remove."""
        while self._containers:
            self._containers.pop().remove()


def remove_fifos(containerd: PrivateContainerd) -> None:
    """Remove the fifos of clients that could not do it themselves.

    A client creates them, and removes them when it deletes the task. It cannot if it was
    killed, or if containerd's cleanup after a killed shim has already deleted the task. A shim
    cannot repair that.
    """
    for trace in traces.fifos(containerd.marks):
        shutil.rmtree(os.path.dirname(trace.name), ignore_errors=True)


def one_line(done: Completed) -> str:
    """Return ctr's only error line.

    While runc and crun create a container, they write to its stderr the message that the line then
    quotes. Anything else on stderr fails the test.
    """
    lines = done.stderr.splitlines()
    said = [line for line in lines if line.startswith("ctr: ")]
    assert len(said) == 1, done.stderr
    assert all(line in said[0] for line in lines if line != said[0]), done.stderr
    return said[0]


def is_refused(done: Completed, words: str, code: str) -> bool:
    """Return whether ctr failed, and for this reason.

    Args:
        done: the result of ctr.
        words: text that containerd 1.x adds to the shim's message; its own shim writes it itself.
        code: our error's code, the only part of the reason that 2.x shows.
    """
    return done.code == 1 and (words in done.stderr or code in done.stderr)


def is_alive(pid: int) -> bool:
    """Return whether a process is alive; a zombie is not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second, if it exits during the read
        return False


def _program(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
