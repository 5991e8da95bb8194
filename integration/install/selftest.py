"""Run a container through a shim that is not current yet.

We execute the new tree's programs as containerd would: ``start``, then Create, Start, Wait, Delete
and Shutdown, with the node's own runc or crun and the node's configuration. The container runs the
tree's own probe (``integration/verify/probe.c``), which exits with a distinctive status. Its events
have to arrive, and nothing may be left behind.

Everything that a test creates has one common name. If a test is killed, the next run can find and
remove it.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
from contextlib import suppress
from typing import Any, Final

import anyio

from api import typeurl
from api.errors import NvshimError
from api.proto import runc_options_pb2
from api.ttrpc import RemoteError
from api.ttrpc.client import connect
from hooks.config import ENVIRONMENT_VARIABLE, NVIDIA_ENVIRONMENT_VARIABLE
from integration.containers import traces
from integration.containers.shim_client import EventsServer, call, execute_verb, verb_words
from integration.install.errors import NoRuntimeToTest, SelfTestFailed
from integration.install_layout import SELF_TEST, SHIM
from integration.json_documents import MALFORMED, parse_json
from integration.timeouts import PATIENCE
from integration.tree import probe_of

_TIMEOUT: Final = 30.0 * PATIENCE
_CALL_TIMEOUT: Final = 15.0 * PATIENCE
_PROGRAM_TIMEOUT: Final = 10.0 * PATIENCE
_CLEAN_TIMEOUT: Final = 5.0 * PATIENCE
_POLL: Final = 0.01
_ID: Final = "probe"
_STATUS: Final = 42
_NAMESPACE: Final = "nvshim-self-test-"
_EVENTS: Final = ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]
_CONFIGURATION: Final = (ENVIRONMENT_VARIABLE, NVIDIA_ENVIRONMENT_VARIABLE)
_RUNTIMES: Final = ("runc", "crun")
_TRACED_KINDS: Final = frozenset({"mount", "socket", "runtime state"})

# Where Kubernetes distributions keep their runtimes.
_MORE_PATHS: Final = (
    "/var/lib/rancher/k3s/data/current/bin",
    "/var/lib/rancher/rke2/data/*/bin",
    "/var/lib/rancher/rke2/bin",
    "/var/lib/k0s/bin",
    "/snap/microk8s/current/bin",
    "/opt/bin",
)


def find_runtime(path: str, requested: str = "") -> str:
    """Return the node's low-level runtime.

    Args:
        path: the search path of the node's programs.
        requested: a name or path; empty for runc, or crun if there is no runc.

    Raises:
        NoRuntimeToTest: no runtime was found.
    """
    more = [found for pattern in _MORE_PATHS for found in sorted(glob.glob(pattern))]
    places = ":".join([path, *more])
    for name in (requested,) if requested else _RUNTIMES:
        found = shutil.which(name, path=places)
        if found:
            return found
    raise NoRuntimeToTest(
        "to start a container",
        found=f"no {requested or ' or '.join(_RUNTIMES)} in {places}",
        do="install one, name it with --runtime, or use --no-self-test",
    )


def run(tree: str, directory: str, *, runtime: str, path: str) -> None:
    """Run a container through a tree's shim and clean up afterwards, whatever happens.

    Args:
        tree: the tree's directory.
        directory: the test's directory; its name starts with :data:`SELF_TEST`.
        runtime: see :func:`find_runtime`.
        path: see :func:`find_runtime`.

    Raises:
        SelfTestFailed: the container did not behave as expected.
        NoRuntimeToTest: there is no runtime to test with.
    """
    runtime = find_runtime(path, runtime)
    environment = {"PATH": path, "NVSHIM_FORK_SERVER": "0", **_configuration_environment()}
    clean(directory)
    try:
        _programs_answer(tree, environment)
        _make_bundle(tree, directory)
        anyio.run(_run, tree, directory, runtime, environment)
        left = _leftover_traces(directory)
        if left:
            raise _failed(tree, "cleanup", f"{', '.join(left)} is left")
    except NvshimError as error:
        if isinstance(error, SelfTestFailed):
            raise
        raise _failed(tree, "a container", str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise _failed(tree, os.path.basename(error.cmd[0]), "it does not exit") from error
    except OSError as error:
        raise _failed(tree, str(error.filename or ""), os.strerror(error.errno or 0)) from error
    finally:
        clean(directory)


def check_configuration(tree: str, current: str, *, path: str) -> None:
    """Check that a tree's version can read the node's configuration.

    An older version does not know each key. If the current version cannot read it either, the
    switch does no harm.

    Args:
        tree: the tree's directory.
        current: the current tree's directory; nothing is checked if there is none.
        path: see :func:`find_runtime`.

    Raises:
        SelfTestFailed: it cannot, so its containers with GPUs would not start.
    """
    environment = {"PATH": path, **_configuration_environment()}
    if not os.path.isdir(current) or not (fault := _configuration_fault(tree, environment)):
        return
    if not _configuration_fault(current, environment):
        raise SelfTestFailed(
            f"the self-test of {os.path.basename(tree)}, the node's configuration",
            found=fault,
            do="the current version stays; change the configuration so that both can read it,"
            " or add --no-self-test",
        )


def _configuration_fault(tree: str, environment: dict[str, str]) -> str:
    """Return what a tree's version finds wrong in the node's configuration; "" for nothing."""
    argv = [os.path.join(tree, "bin", "nvshim"), "config", "validate", "-o", "json"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROGRAM_TIMEOUT,
            check=False, env=environment,
        )  # fmt: skip
        answer = parse_json(done.stdout)
        return "" if answer["valid"] else str(answer["error"]["message"])
    except (OSError, subprocess.TimeoutExpired, *MALFORMED):
        return ""  # the first versions have no such command


def clean(directory: str) -> None:
    """Remove everything that a test has created.

    Args:
        directory: the test's directory; it need not exist.
    """
    marks = _marks(directory)
    traces.clean(marks, _CLEAN_TIMEOUT)
    traces.forget(marks.namespace)
    for folder in (_socket_directory(directory), directory):
        shutil.rmtree(folder, ignore_errors=True)


def _marks(directory: str) -> traces.Marks:
    """Return what identifies the traces of a test."""
    events = os.path.join(_socket_directory(directory), "e")
    return traces.Marks(directory, events, _namespace(directory), frozenset({_ID}), wary=True)


async def _run(tree: str, directory: str, runtime: str, environment: dict[str, str]) -> None:
    where = _socket_directory(directory)
    os.makedirs(where, mode=0o700)
    events = EventsServer(os.path.join(where, "e"), _namespace(directory))
    step = "the verb start"
    try:
        with anyio.fail_after(_TIMEOUT):
            async with anyio.create_task_group() as tasks:
                await tasks.start(events.serve)
                address = await anyio.to_thread.run_sync(_start, tree, directory, environment)
                async with connect(address) as client:
                    bundle = os.path.join(directory, _ID)
                    options = typeurl.pack(runc_options_pb2.Options(binary_name=runtime))
                    for method, fields in (
                        ("Create", {"bundle": bundle, "options": options}),
                        ("Start", {}),
                        ("Wait", {}),
                        ("Delete", {}),
                    ):
                        step = method
                        answer = await call(
                            client,
                            method,
                            timeout=_CALL_TIMEOUT,
                            id=_ID,
                            **fields,  # type: ignore[arg-type] # the fields of this method
                        )
                        if method == "Wait" and answer.exit_status != _STATUS:
                            found = f"status {answer.exit_status} instead of {_STATUS}"
                            raise _failed(tree, "the container's exit", found)
                    step = "events"
                    await events.until(_EVENTS[-1], seconds=_CALL_TIMEOUT)
                    if events.of(_ID) != _EVENTS:
                        raise _failed(tree, "events", ", ".join(events.of(_ID)))
                    step = "Shutdown"
                    with suppress(NvshimError):  # it may exit before it has answered
                        await call(client, step, timeout=_CALL_TIMEOUT, id=_ID)
                step = "the shim's exit"
                while traces.processes(_marks(directory)):  # noqa: ASYNC110 - seen from outside
                    await anyio.sleep(_POLL)
                tasks.cancel_scope.cancel()
    except TimeoutError as error:
        raise _failed(tree, step, "no answer in time") from error
    except BaseExceptionGroup as group:
        cause = _first(group)
        if isinstance(cause, SelfTestFailed):
            raise cause from None
        raise _failed(tree, step, _message_of(cause)) from cause


def _programs_answer(tree: str, environment: dict[str, str]) -> None:
    """Check that both programs start with their own interpreter."""
    for name, flag in ((SHIM, "-v"), ("nvshim", "--version")):
        program = os.path.join(tree, "bin", name)
        result = subprocess.run(
            [program, flag],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROGRAM_TIMEOUT,
            check=False,
            env=environment,
        )
        if result.returncode:
            raise _failed(tree, f"{name} {flag}", _text(result))


def _start(tree: str, directory: str, environment: dict[str, str]) -> str:
    """Execute the start verb; return the shim's address."""
    events = os.path.join(_socket_directory(directory), "e")
    words = verb_words(
        os.path.join(tree, "bin", SHIM), "start", namespace=_namespace(directory),
        address=events, container_id=_ID,
    )  # fmt: skip
    result = execute_verb(
        words, os.path.join(directory, _ID), environment={**environment, "TTRPC_ADDRESS": events}
    )
    if result.returncode:
        raise _failed(tree, "the verb start", _text(result))
    return result.stdout.decode()


def _make_bundle(tree: str, directory: str) -> None:
    bundle = os.path.join(directory, _ID)
    rootfs = os.path.join(bundle, "rootfs")
    for name in ("proc", "dev"):
        os.makedirs(os.path.join(rootfs, name), mode=0o755)
    os.chmod(bundle, 0o700)
    shutil.copy(probe_of(tree), os.path.join(rootfs, _ID))
    with open(os.path.join(bundle, "config.json"), "w", encoding="utf-8") as text:
        json.dump(_spec(_namespace(directory)), text)
    # The shim's log, which containerd would create as a fifo; a fifo would need a reader.
    with open(os.path.join(bundle, "log"), "wb"):
        pass


def _spec(namespace: str) -> dict[str, Any]:
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [f"/{_ID}", "exit", str(_STATUS)],
            "env": ["PATH=/"],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": _ID,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        ],
        "linux": {
            "cgroupsPath": f"/{namespace}/{_ID}",
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
        },
    }


def _configuration_environment() -> dict[str, str]:
    """Return the part of our environment that locates the configuration, for the shim."""
    return {name: value for name, value in os.environ.items() if name in _CONFIGURATION}


def _namespace(directory: str) -> str:
    return _NAMESPACE + os.path.basename(directory).removeprefix(SELF_TEST)


def _socket_directory(directory: str) -> str:
    """Return the directory of the events socket; below a long prefix its name would not fit."""
    return os.path.join("/run", _namespace(directory))


def _leftover_traces(directory: str) -> list[str]:
    found = sorted(traces.find(_marks(directory)))
    return [f"the {each.kind} {each.name}" for each in found if each.kind in _TRACED_KINDS]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _message_of(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    # The error of the call contains the shim's message.
    return (error.found if isinstance(error, RemoteError) else str(error)) or type(error).__name__


def _text(result: subprocess.CompletedProcess[bytes]) -> str:
    output = result.stdout.decode(errors="replace").strip()
    return f"status {result.returncode}{': ' if output else ''}{output}"


def _failed(tree: str, step: str, found: str) -> SelfTestFailed:
    return SelfTestFailed(
        f"the self-test of {os.path.basename(tree)}, {step}",
        found=found,
        do="the current version stays; nvshim doctor may show the reason",
    )
