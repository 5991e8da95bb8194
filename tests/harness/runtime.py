"""A runtime of a containerd, and what tests do with its containers.

Tests are written against a runtime's name, so that they can be validated against containerd's
own shim: a test that fails there asks for something that no shim has to do.
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

# What runc and crun say of "no-such-program".
NO_SUCH_PROGRAM: Final = re.compile(
    r"""exec: "no-such-program": executable file not found in \$PATH"""
    r"""|executable file `no-such-program` not found in \$PATH"""
)

# Not used twice in a test run, so that a trace names its test's container and no other.
_numbers = itertools.count(1)

# The flags of ``ctr`` that choose a low-level runtime, or its place.
_CHOOSE_LOW_LEVEL: Final = frozenset({"--runtime-config-path", "--runc-binary", "--runc-root"})


def new_name(kind: str = "c") -> str:
    """A name that no container, exec or pod has had in this run."""
    return f"{kind}{next(_numbers)}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Container:
    """A container that runs detached."""

    runtime: Runtime  # whose it is
    name: str  # its id

    @property
    def pid(self) -> int:
        """Its init process, as containerd knows it; 0 if there is no task."""
        return self._task()[0]

    @property
    def status(self) -> str:
        """What containerd says: RUNNING, STOPPED, CREATED …, or "" if there is no task."""
        return self._task()[1]

    def exec(
        self, *command: str, flags: Iterable[str] = (), stdin: str = "", timeout: float = 60
    ) -> Completed:
        """Run a command in it to its end; another code than 0 is no error."""
        return self.runtime.containerd.ctr(
            *self.exec_words(*command, flags=flags), stdin=stdin, timeout=timeout, check=False
        )

    def exec_words(
        self, *command: str, flags: Iterable[str] = (), exec_id: str | None = None
    ) -> list[str]:
        """The words for ``ctr`` that run a command in it."""
        # A log takes the place of fifos, and ctr refuses both.
        flags = tuple(flags)
        if "--log-uri" not in flags:
            flags = ("--fifo-dir", self.runtime.containerd.fifo_directory, *flags)
        return [
            "tasks", "exec", "--exec-id", exec_id or new_name("e"), *flags, self.name, *command,
        ]  # fmt: skip

    def kill(self, signal: str = "KILL", *, flags: Iterable[str] = ()) -> Completed:
        """Send a signal to its init, or what the flags say."""
        return self.runtime.containerd.ctr(
            "tasks", "kill", "--signal", signal, *flags, self.name, check=False
        )

    def wait_for(self, status: str, *, timeout: float = 60) -> None:
        """Wait until containerd says that it is in that state."""
        eventually(lambda: self.status == status, f"{self.name} is {status}", timeout=timeout)

    def delete_task(self) -> int:
        """Delete the task, and return the exit code that containerd knew of it."""
        return api.delete_task(self.runtime.containerd, self.name)

    def exit_code(self, *, timeout: float = 60) -> int:
        """Wait for its end, delete the task, and return its exit code."""
        self.wait_for("STOPPED", timeout=timeout)
        return self.delete_task()

    @property
    def pids(self) -> list[int]:
        """The processes in it, as containerd lists them."""
        lines = self.runtime.containerd.ctr("tasks", "ps", self.name).lines[1:]
        return [int(line.split()[0]) for line in lines]

    def wait_for_program(self, name: str) -> int:
        """Wait until a program of that name runs in it, and return its pid."""

        def look() -> int:
            return next((pid for pid in self.pids if _program(pid) == name), 0)

        return eventually(look, f"{name} runs in {self.name}")

    def remove(self) -> None:
        """Kill it, delete its task, remove it. What is gone already is no error."""
        api.remove_container(self.runtime.containerd, self.name)

    def _task(self) -> tuple[int, str]:
        task = api.tasks(self.runtime.containerd).get(self.name)
        return (task.pid, Status.Name(task.status)) if task is not None else (0, "")


class Runtime:
    """What a test has in hand.

    Args:
        containerd: it runs for the length of the test.
        name: the runtime's name.
        low_level: the low-level runtime that containers get unless a test says otherwise; None
            for the shim's default.
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
        """Whether it is the shim of this project, and not one to compare with."""
        return self.name == OURS

    def words(
        self,
        *command: str,
        image: str = BUSYBOX,
        name: str | None = None,
        flags: Iterable[str] = (),
    ) -> list[str]:
        """The words for ``ctr`` that run a container."""
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
        """Run a container to its end and remove it; another code than 0 is no error."""
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
        """Start a container that runs on by itself. It is removed at the end of the test."""
        container = self.expect(name)
        self.containerd.ctr(
            *self.words(*command, image=image, name=container.name, flags=("--detach", *flags))
        )
        return container

    def start_idle(self, *, image: str = BUSYBOX, flags: Iterable[str] = ()) -> Container:
        """Start a container that does nothing until it is killed."""
        return self.start("sleep", "1000", image=image, flags=flags)

    def expect(self, name: str | None = None) -> Container:
        """A container that the test starts by other means. It is removed at the end."""
        container = Container(self, name or new_name())
        self._containers.append(container)
        return container

    def spec(
        self, *command: str, image: str = BUSYBOX, flags: Iterable[str] = ()
    ) -> dict[str, Any]:
        """The OCI spec that ``ctr`` makes for a command in an image."""
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
        """Tell containerd of a container, with a spec and a snapshot but no task."""
        self.containerd.ctr(
            "containers", "create", "--runtime", self.name, *self._default_low_level(()), image,
            name, *command,
        )  # fmt: skip

    def prepare_rootfs(self, name: str) -> list[tuple[str, str, tuple[str, ...]]]:
        """The mounts of a container's snapshot: type, source, options of each."""
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
        """The flags of ``ctr run`` that choose the low-level runtime and its root.

        ``ctr`` has flags for them for containerd's own shim only; others are given a file, as
        CRI gives it to them.

        Args:
            directory: where that file is written.
            binary: the program; None for the shim's default.
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
        """Whether no container can have mapped ids here.

        The low-level runtime is chosen by options, and containerd 2 takes any for runc's then.
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

    A client makes them, and removes them when it deletes the task. It cannot if it was killed,
    or if containerd's clean-up after a killed shim has deleted the task before. No shim can
    repair that.
    """
    for trace in traces.fifos(containerd.marks):
        shutil.rmtree(os.path.dirname(trace.name), ignore_errors=True)


def one_line(done: Completed) -> str:
    """The one line in which ctr says what is wrong.

    runc and crun have the container's stderr while they make it, and say there in their own
    words what the line then quotes. Anything else on stderr is an error of the test.
    """
    lines = done.stderr.splitlines()
    said = [line for line in lines if line.startswith("ctr: ")]
    assert len(said) == 1, done.stderr
    assert all(line in said[0] for line in lines if line != said[0]), done.stderr
    return said[0]


def is_refused(done: Completed, words: str, code: str) -> bool:
    """Whether ctr failed, and for a certain reason.

    Args:
        done: how it ended.
        words: what containerd 1.x adds to the shim's message, and its own shim says itself.
        code: our error's code, which is all there is to see of the reason with 2.x.
    """
    return done.code == 1 and (words in done.stderr or code in done.stderr)


def is_alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second, if it ends while it is read
        return False


def _program(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
