"""Drive a shim without containerd: call its verbs and its API, and receive its events.

containerd hides the shim's exact answers and the order of its events. Here the test takes the place
of containerd: it makes the bundle, calls ``start``, speaks ttrpc, and serves the socket for events.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final

import anyio
from google.protobuf.any_pb2 import Any as AnyMessage

from api import typeurl
from api.errors import Status
from api.proto import bootstrap_pb2, runc_options_pb2, task_types_pb2
from api.ttrpc import RemoteError
from api.ttrpc.client import Client, connect
from integration.containers.shim_client import EventsServer, call, execute_verb, verb_words
from integration.timeouts import PATIENCE
from tests.harness.bundle import lay_out, plain_spec
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually
from tools.images import Image, busybox

# Unique to this process: two parallel test runs must not collide.
NAMESPACE: Final = f"nvshim-by-hand-{os.getpid()}"
CGROUP: Final = f"/{NAMESPACE}"
# crun refuses a host with both cgroup versions; then v2 is hidden from it.
_SECOND_CGROUPS: Final = "/sys/fs/cgroup/unified"
_HIDE_SECOND_CGROUPS: Final = f"""
exec unshare --mount sh -c 'umount {_SECOND_CGROUPS}; exec crun "$@"' crun "$@"
"""
_WITHOUT_SECOND_CGROUPS: Final = (
    "unshare", "--mount", "--propagation", "slave", "sh", "-c",
    f'umount -l {_SECOND_CGROUPS} && exec "$@"', "shim",
)  # fmt: skip
RUNC_ROOT: Final = f"/run/containerd/runc/{NAMESPACE}"

LIFE: Final = ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]
"""The events of a container from its creation to its deletion."""


class ShimByHand:
    """One shim, its bundles, and a client of it.

    Args:
        directory: for bundles and sockets.
        launcher: the program.
        bootstrap: whether to use the bootstrap protocol of containerd 2.3 and later.
    """

    def __init__(self, directory: str, launcher: str, *, bootstrap: bool) -> None:
        self.directory = directory
        self.events = EventsServer(os.path.join(directory, "c.sock.ttrpc"), NAMESPACE)
        self.client: Client
        self.pid = 0
        self.service = "containerd.task.v3.Task" if bootstrap else "containerd.task.v2.Task"
        self.socket_path = ""
        # Nothing would stop a fork server that a single test left behind.
        self.environment = {"NVSHIM_FORK_SERVER": "0"}
        # Whether the shim itself sees a host that crun supports, so that crun needs no wrapper.
        self.for_crun = False
        # Whether it logs at debug level.
        self.debug = False
        self._launcher = launcher
        self._bootstrap = bootstrap
        self.ids: list[str] = []
        self._runtimes = 0

    def bundle(
        self,
        container_id: str,
        *args: str,
        env: Sequence[str] = (),
        shared_pids: bool = False,
        annotations: dict[str, str] | None = None,
        image: Image | None = None,
        rootfs: str = "",
    ) -> str:
        """Make a bundle as containerd does, of an image or of busybox; return its path.

        Reusing the ``rootfs`` of another bundle saves most of the time.
        """
        path = os.path.join(self.directory, container_id)
        os.makedirs(path, mode=0o700)
        if not rootfs:
            lay_out((image or busybox()).tree, os.path.join(path, "rootfs"))
        spec = json.loads(plain_spec())
        spec["process"].update(terminal=False, args=list(args))
        spec["process"]["env"] += env
        spec["root"].update(readonly=False, path=rootfs or "rootfs")
        spec["linux"]["cgroupsPath"] = f"{CGROUP}/{container_id}"
        spec["annotations"] = annotations or {}
        if shared_pids:
            namespaces = spec["linux"]["namespaces"]
            spec["linux"]["namespaces"] = [n for n in namespaces if n["type"] != "pid"]
        self.write_spec(container_id, spec)
        os.mkfifo(os.path.join(path, "log"), 0o700)
        self.ids.append(container_id)
        return path

    def sandbox_bundle(self, sandbox_id: str) -> str:
        """Make a bundle for a sandbox as containerd does, without a spec; return its path."""
        path = os.path.join(self.directory, sandbox_id)
        os.makedirs(path, mode=0o700)
        os.mkdir(os.path.join(path, "rootfs"), 0o711)
        os.mkfifo(os.path.join(path, "log"), 0o700)
        return path

    def spec(self, container_id: str) -> dict[str, Any]:
        """Read the spec of a bundle."""
        with open(os.path.join(self.directory, container_id, "config.json"), "rb") as file:
            spec: dict[str, Any] = json.load(file)
        return spec

    def write_spec(self, container_id: str, spec: dict[str, Any]) -> None:
        """Replace the spec of a bundle."""
        path = os.path.join(self.directory, container_id, "config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(spec, file)

    def start_words(self, container_id: str) -> list[str]:
        """Return the command line of ``start``."""
        address = os.path.join(self.directory, "c.sock")
        return verb_words(
            self._launcher, "start", namespace=NAMESPACE, address=address, container_id=container_id
        )

    def start_verb(self, container_id: str) -> str:
        """Call ``start`` in a bundle; return the address that it prints."""
        address = os.path.join(self.directory, "c.sock")
        stdin = b""
        if self._bootstrap:
            params = bootstrap_pb2.BootstrapParams(
                instance_id=container_id,
                namespace=NAMESPACE,
                containerd_grpc_address=address,
                containerd_ttrpc_address=f"{address}.ttrpc",
            )
            stdin = params.SerializeToString()
        argv = self.start_words(container_id)
        if self.debug:
            argv.insert(-1, "-debug")
        if self.for_crun and _has_second_cgroups():
            argv = [*_WITHOUT_SECOND_CGROUPS, *argv]
        done = execute_verb(
            argv,
            os.path.join(self.directory, container_id),
            stdin=stdin,
            environment={
                "PATH": os.environ["PATH"],
                "TTRPC_ADDRESS": f"{address}.ttrpc",
                **self.environment,
            },
        )
        done.check_returncode()
        if self._bootstrap:
            result = bootstrap_pb2.BootstrapResult.FromString(done.stdout)
            assert (result.version, result.protocol) == (3, "ttrpc")
            return str(result.address)
        return done.stdout.decode()

    async def call(self, method: str, *, timeout: float = 60 * PATIENCE, **fields: Any) -> Any:
        """Call a method of the Task service by its name and its request's fields."""
        return await call(self.client, method, service=self.service, timeout=timeout, **fields)

    async def create(self, container_id: str, **fields: Any) -> int:
        """Create a task in its bundle, optionally on a terminal; return init's pid."""
        if fields.get("terminal"):
            spec = self.spec(container_id)
            spec["process"]["terminal"] = True
            self.write_spec(container_id, spec)
        bundle = os.path.join(self.directory, container_id)
        return int((await self.call("Create", id=container_id, bundle=bundle, **fields)).pid)

    async def exec(self, container_id: str, exec_id: str, *args: str, **fields: Any) -> None:
        """Add an exec."""
        process = {"args": args, "cwd": "/", "env": ["PATH=/usr/bin"], "user": {"uid": 0, "gid": 0}}
        process["terminal"] = fields.get("terminal", False)
        spec = typeurl.pack_json(process, typeurl.PROCESS)
        await self.call("Exec", id=container_id, exec_id=exec_id, spec=spec, **fields)

    async def start_exec(self, container_id: str, exec_id: str, *args: str, **fields: Any) -> int:
        """Add an exec and start it; return its pid."""
        await self.exec(container_id, exec_id, *args, **fields)
        return int((await self.call("Start", id=container_id, exec_id=exec_id)).pid)

    async def reap(self, container_id: str, exec_id: str = "") -> int:
        """Wait for a task or an exec, and delete it; return its exit status."""
        status = int((await self.call("Wait", id=container_id, exec_id=exec_id)).exit_status)
        await self.call("Delete", id=container_id, exec_id=exec_id)
        return status

    async def run(self, container_id: str, **fields: Any) -> int:
        """Create and start a task; return init's pid."""
        await self.create(container_id, **fields)
        return int((await self.call("Start", id=container_id)).pid)

    async def end(self, container_id: str) -> int:
        """Kill a task, wait for it and delete it; return its exit status."""
        await self.call("Kill", id=container_id, signal=signal.SIGKILL)
        return await self.reap(container_id)

    async def finish(self) -> None:
        """Stop all containers in any state, and the shim; fail if anything is left."""
        for container_id in self.ids:
            if await outcome(self.call("State", id=container_id)) == Status.NOT_FOUND:
                continue
            if await self.status(container_id) in {"CREATED", "STOPPED"}:
                await self.call("Delete", id=container_id)
            else:
                await self.end(container_id)
        await gone(self, self.ids[0])

    async def status(self, container_id: str, exec_id: str = "") -> str:
        """Return the state of a task or exec, as the shim reports it."""
        state = await self.call("State", id=container_id, exec_id=exec_id)
        return str(task_types_pb2.Status.Name(state.status))

    def fifo(self, name: str) -> str:
        """Make a fifo; return its path."""
        path = os.path.join(self.directory, name)
        os.mkfifo(path)
        return path

    def options(self, binary: str = "runc", *, before: str = "") -> AnyMessage:
        """Return runtime options that name a low-level runtime.

        Args:
            binary: its path.
            before: shell commands to run before it, with the runtime's verb in ``$verb`` and its
                arguments in ``$@``; ``$binary`` is the runtime.
        """
        if binary == "crun" and _has_second_cgroups():
            before += _HIDE_SECOND_CGROUPS
        if before:
            path = os.path.join(self.directory, f"runtime-{self._runtimes}")
            self._runtimes += 1
            with open(path, "w", encoding="utf-8") as file:
                # --root ROOT --log LOG --log-format json VERB
                file.write(f'#!/bin/sh\nbinary={binary}\nverb=$7\n{before}\nexec $binary "$@"\n')
            os.chmod(path, 0o755)
            binary = path
        return typeurl.pack(runc_options_pb2.Options(binary_name=binary))

    def open_files(self) -> list[str]:
        """Return the shim's open files by name, without its connections to this process."""
        names = []
        folder = f"/proc/{self.pid}/fd"
        for fd in os.listdir(folder):
            with suppress(FileNotFoundError):
                names.append(os.readlink(os.path.join(folder, fd)))
        return sorted("socket" if name.startswith("socket:") else name for name in names)

    async def files_at_rest(
        self, expected: list[str] | None = None, *, may_have: str = ""
    ) -> list[str]:
        """Return the shim's open files once they are as expected, or at the timeout.

        Without ``expected``, wait until they stay the same: a new shim still loads modules.

        Args:
            expected: the names of the files.
            may_have: the name of a file that may be open in addition, once.
        """
        awaited = [expected, sorted([*(expected or ()), may_have])] if may_have else [expected]
        seen = self.open_files()
        with anyio.move_on_after(60 * PATIENCE):
            while seen not in awaited:
                await anyio.sleep(0.01 if expected is not None else 0.1)
                before, seen = seen, self.open_files()
                if expected is None and seen == before:
                    break
        return seen

    def children(self) -> list[str]:
        """Return the shim's children, each as its pid, name and state."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with (
                suppress(OSError),
                open(f"/proc/{pid}/stat", encoding="utf-8", errors="surrogateescape") as file,
            ):
                name, _, rest = file.read().rpartition(")")
                state, parent = rest.split()[:2]
                if int(parent) == self.pid:
                    found.append(f"{name}) {state}")
        return found

    async def log_lines(self, container_id: str, ask: int | None = None) -> list[str]:
        """Return the current lines of a bundle's log.

        Args:
            container_id: the bundle; the shim logs to that of its first container.
            ask: a signal to send first, to which the shim replies in its log.
        """
        path = os.path.join(self.directory, container_id, "log")
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            text = _what_is_in(fd)
            if ask is not None:
                os.kill(self.pid, ask)
                with anyio.fail_after(60 * PATIENCE):
                    while b"msg=task" not in text:
                        await anyio.sleep(0.01)
                        text += _what_is_in(fd)
                # It logs everything at once, so a call that is answered later comes after it.
                await self.call("Connect", id=container_id)
                text += _what_is_in(fd)
            return text.decode().splitlines()
        finally:
            os.close(fd)

    async def until_loaded(self, container_id: str) -> None:
        """Wait until the shim has preloaded its modules, a second after its start.

        Args:
            container_id: the shim's first container. The shim needs to log at debug level.
        """
        assert self.debug
        with anyio.fail_after(30 * PATIENCE):
            lines: list[str] = []
            while not any("all modules are loaded" in line for line in lines):
                await anyio.sleep(0.05)
                lines = await self.log_lines(container_id)

    def delete_verb(self, container_id: str) -> float:
        """Call ``delete`` as containerd does after a shim has died; return how long it took."""
        bundle = os.path.join(self.directory, container_id)
        argv = verb_words(
            self._launcher, "delete", namespace=NAMESPACE, address=f"{self.directory}/c.sock",
            container_id=container_id, bundle=bundle,
        )  # fmt: skip
        began = time.monotonic()
        subprocess.run(argv, cwd=bundle, capture_output=True, timeout=60 * PATIENCE, check=True)
        return time.monotonic() - began

    async def until_gone(self, *, seconds: float = 60 * PATIENCE) -> None:
        """Wait until the shim's process has exited."""
        with anyio.fail_after(seconds):
            while is_alive(self.pid):  # noqa: ASYNC110 - seen from outside
                await anyio.sleep(0.01)

    def leftovers(self) -> list[str]:
        """Return the traces of the containers and the shim on the machine, except bundles."""
        left = [f"mount {path}" for path in self._mounts()]
        for folder, names, _ in os.walk("/sys/fs/cgroup"):
            if folder.endswith(CGROUP):
                left += [f"cgroup {folder}/{name}" for name in names]
        with suppress(FileNotFoundError):
            # Names that start with a dot are crun's own, shared by all containers.
            names = [name for name in os.listdir(RUNC_ROOT) if not name.startswith(".")]
            left += [f"runtime state {name}" for name in names]
        if self.socket_path and os.path.exists(self.socket_path):
            left.append(f"socket {self.socket_path}")
        left += [f"announcement {path}" for path in glob.glob(f"{self.socket_path}.*")]
        if self.pid and is_alive(self.pid):
            left.append(f"process {self.pid}")
        return left

    def _mounts(self) -> list[str]:
        # os.path.ismount does not detect a bind mount of the same file system.
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            points = [line.split()[4] for line in file]
        return [point for point in points if point.startswith(f"{self.directory}/")]

    def clean(self) -> None:
        """Stop and remove everything, in any state."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        for container_id in self.ids:
            # Most tests have removed their containers.
            for binary in ("runc", "crun") if os.path.exists(f"{RUNC_ROOT}/{container_id}") else ():
                argv = [binary, "--root", RUNC_ROOT, "delete", "--force", container_id]
                subprocess.run(argv, capture_output=True, check=False)
        for mount in self._mounts():
            subprocess.run(["umount", "-l", mount], check=True)
        if self.socket_path:
            for path in (self.socket_path, *glob.glob(f"{self.socket_path}.*")):
                with suppress(FileNotFoundError):
                    os.unlink(path)
        for folder, names, _ in os.walk("/sys/fs/cgroup"):
            if os.path.basename(CGROUP) in names:
                # A container's cgroup stays if its processes had left it before the deletion.
                for below, _, _ in os.walk(folder + CGROUP, topdown=False):
                    with suppress(OSError):
                        os.rmdir(below)
        shutil.rmtree(RUNC_ROOT, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)


@asynccontextmanager
async def shim_by_hand(
    launcher: str,
    first: str,
    *args: str,
    bootstrap: bool = False,
    environment: Mapping[str, str] | None = None,
    sandbox: bool = False,
    for_crun: bool = False,
    debug: bool = False,
    **bundle: Any,
) -> AsyncIterator[ShimByHand]:
    """Start a shim for a first container, or a sandbox, which is not created yet.

    Everything is removed at the end, also after a failure.

    Args:
        launcher: the program.
        first: the container.
        args: its program.
        bootstrap: see :class:`ShimByHand`.
        environment: further variables for the shim.
        sandbox: whether the first is a sandbox.
        for_crun: whether the shim sees a host that crun supports.
        debug: whether the shim logs at debug level.
        bundle: see :meth:`ShimByHand.bundle`.
    """
    # Not below pytest's directory: the paths of unix sockets are short. Bundles are two levels
    # down, as containerd's are: shims search those of all namespaces for holders of a GPU.
    place = tempfile.mkdtemp(prefix="nvshim-")
    os.chmod(place, 0o711)  # tests in a user namespace have to reach the files below it, too
    shim = ShimByHand(f"{place}/n", launcher, bootstrap=bootstrap)
    os.mkdir(shim.directory, 0o700)
    shim.environment.update(environment or {})
    shim.for_crun = for_crun
    shim.debug = debug
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(shim.events.serve)
            if sandbox:
                shim.sandbox_bundle(first)
            else:
                shim.bundle(first, *args, **bundle)
            address = shim.start_verb(first)
            shim.socket_path = address.removeprefix("unix://")
            async with connect(address) as shim.client:
                shim.pid = (await shim.call("Connect", id=first)).shim_pid
                yield shim
            tasks.cancel_scope.cancel()
    finally:
        shim.clean()
        shutil.rmtree(place, ignore_errors=True)


def _has_second_cgroups() -> bool:
    return os.path.exists(f"{_SECOND_CGROUPS}/cgroup.controllers")


def wait_for_file(path: str, *, seconds: float = 10) -> str:
    """Wait for a file that a container writes; return its content."""

    def content() -> str:
        with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
            return file.read()
        return ""

    return eventually(content, f"{path} is written", timeout=seconds)


def _what_is_in(fifo: int) -> bytes:
    content = b""
    with suppress(BlockingIOError):
        while chunk := os.read(fifo, 1 << 16):
            content += chunk
    return content


def content_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def shell(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", script])


async def gone(shim: ShimByHand, container_id: str) -> None:
    """Shut the shim down, and check that nothing is left."""
    await shim.call("Shutdown", id=container_id)
    await shim.until_gone()
    assert shim.leftovers() == []


StartShim = Callable[..., AbstractAsyncContextManager[ShimByHand]]
"""The type of the fixture of that name: :func:`shim_by_hand`, without the launcher argument."""


async def outcome(call: Awaitable[Any]) -> int:
    """Return the status of a call; check that a refusal is one line."""
    try:
        await call
    except RemoteError as error:
        assert "\n" not in str(error)  # noqa: PT017 - it may succeed as well
        return int(error.status)
    return Status.OK
