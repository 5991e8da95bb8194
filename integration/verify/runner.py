"""Run the checks in order on this node and collect their results."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.proto import cri_pb2 as pb
from hooks.config import Config, Mode
from integration.containers import verify_pods
from integration.cri.client import Cri
from integration.cri.engine import CRI_SOCKETS, Engine
from integration.cri.errors import CriError
from integration.nvml.inventory import inventory_of
from integration.verify.checks import CHECKS, Check
from integration.verify.errors import (
    EngineMissing,
    NothingVerified,
    PodKept,
    VerifyRunning,
    VerifyUnusable,
)
from integration.verify.interrupts import Interrupts
from integration.verify.kubelet import Kubelet
from integration.verify.node import Node
from integration.verify.outcomes import CheckFailed, CheckSkipped, Outcome, Result
from integration.verify.pods import Pods, PodSettings, find_image
from integration.verify.probe import find_program
from shim import VERSION

_NAMESPACE: Final = "nvshim-verify"
_SYSTEMD: Final = "SystemdCgroup"
_REMOVAL: Final = "the engine removes every pod of the verification"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of a verification."""

    handler: str  # the engine's runtime handler
    cri_socket: str = ""  # the engine's CRI socket; "" for the first known one that exists
    checks: Sequence[Check] = CHECKS  # the checks to run, in order
    restart_agent: bool = False  # whether a check may restart the node agent


@dataclass(frozen=True, slots=True)
class Verification:
    """The results of a verification."""

    node: dict[str, Any]  # a description of the node, as JSON values
    results: tuple[Result, ...]  # one per check
    seconds: float

    def count(self, outcome: Outcome) -> int:
        """Return how many checks had this outcome."""
        return sum(result.outcome is outcome for result in self.results)


def verify(
    config: Config, options: VerifyOptions, report_progress: Callable[[str], None]
) -> Verification:
    """Verify this node and leave nothing behind, even after a failure.

    Args:
        config: the shim's configuration.
        options: which checks to run, and how.
        report_progress: called with a short text for each step.

    Raises:
        VerifyError: the node cannot be verified.
        CriError: the engine does not answer.
        NvshimError: the node has no driver.
    """
    started = time.monotonic()
    program = find_program()
    inventory = inventory_of(config, fresh=True)
    with (
        Interrupts() as interrupts,
        _directory(config) as directory,
        Cri(_socket(options.cri_socket)) as cri,
    ):
        report_progress("querying the engine")
        engine = cri.engine()
        settings = PodSettings(
            handler=options.handler,
            namespace=_namespace(config),
            image=find_image(cri),
            program=program,
            directory=directory,
            systemd=_is_systemd(cri, engine, options.handler),
        )
        results: tuple[Result, ...] = ()
        try:
            with Pods(cri, settings, interrupts) as pods:
                node = Node(
                    config, inventory, engine, pods, Kubelet(config),
                    restart_agent=options.restart_agent,
                )  # fmt: skip
                results = tuple(_results(node, options.checks, report_progress))
        except PodKept as error:
            if not results:
                raise
            results = (*results, _kept(error))
    if all(result.outcome is Outcome.SKIPPED for result in results):
        raise NothingVerified(
            "to verify this node",
            found="; ".join(f"{result.name}: {result.told}" for result in results)
            or "no check was selected",
            do="select other checks with --only, or run all of them",
        )
    return Verification(_described(node), results, round(time.monotonic() - started, 1))


def _results(
    node: Node, checks: Sequence[Check], report_progress: Callable[[str], None]
) -> Iterator[Result]:
    """Run the checks; skip those that depend on a failed check, directly or indirectly."""
    unmet: set[str] = set()
    for check in checks:
        report_progress(f"{check.name}: {check.title}")
        lacking = [name for name in check.needs if name in unmet]
        if lacking:
            result = Result(
                check.name, check.title, Outcome.SKIPPED, told=f"depends on: {', '.join(lacking)}"
            )
        else:
            result = _result(check, node)
        if lacking or result.outcome is Outcome.FAILED:
            unmet.add(check.name)
        yield result
    report_progress("")


def _result(check: Check, node: Node) -> Result:
    started = time.monotonic()

    def result(outcome: Outcome, **texts: str) -> Result:
        seconds = round(time.monotonic() - started, 1)
        return Result(check.name, check.title, outcome, seconds=seconds, **texts)

    def failed(error: CheckFailed) -> Result:
        return result(Outcome.FAILED, expected=error.expected, seen=error.seen, do=error.do)

    try:
        return result(Outcome.PASSED, told=check.run(node))
    except CheckSkipped as error:
        return result(Outcome.SKIPPED, told=error.why)
    except CheckFailed as error:
        return failed(error)
    except CriError as error:
        do = error.do or "see the engine's log, and run `nvshim doctor`"
        return failed(CheckFailed(check.title, seen=f"{error.asked}: {error.found}", do=do))


def _kept(error: PodKept) -> Result:
    """Return the result of a removal that the engine refused, after all checks."""
    failed = CheckFailed(_REMOVAL, seen=f"{error.asked}: {error.found}", do=error.do)
    return Result(
        "removal", _REMOVAL, Outcome.FAILED, expected=_REMOVAL, seen=failed.seen, do=failed.do
    )


def _described(node: Node) -> dict[str, Any]:
    """Describe the node without anything that identifies it, such as host names or UUIDs."""
    driver = node.inventory.driver
    return {
        "version": VERSION,
        "gpus": [
            {"index": gpu.index, "model": gpu.model or None, "mig": gpu.mig, "lost": bool(gpu.lost)}
            for gpu in node.inventory.gpus
        ],
        "driver": driver.version,
        "engine": node.engine.name,
        "engine_version": node.engine.version,
        "handler": node.handler,
        "kubelet": node.kubelet.is_there,
        "policy": str(node.config.mode),
    }


def _socket(named: str) -> str:
    """Return the engine's CRI socket.

    Raises:
        EngineMissing: no known socket exists.
    """
    places = (named.removeprefix("unix://"),) if named else CRI_SOCKETS
    for path in places:
        if os.path.exists(path):
            return path
    raise EngineMissing(
        "to find an engine that runs pods", found=f"no socket {' or '.join(places)} exists"
    )


def _namespace(config: Config) -> str:
    """Return the pods' namespace; in strict mode a trusted one, so that requests are granted."""
    trusted = config.trusted_namespaces
    return trusted[0] if config.mode == Mode.STRICT and trusted else _NAMESPACE


def _is_systemd(cri: Cri, engine: Engine, handler: str) -> bool:
    """Return whether the handler uses the systemd cgroup driver, whose parents are slices."""
    with contextlib.suppress(CriError):  # containerd 1 does not support the call
        driver = cri.runtime_config(pb.RuntimeConfigRequest()).linux.cgroup_driver
        return driver == pb.SYSTEMD
    options = engine.handler(handler).get("options")
    return isinstance(options, dict) and options.get(_SYSTEMD) is True


@contextlib.contextmanager
def _directory(config: Config) -> Iterator[str]:
    """Lock and yield a directory for the pods' logs, and remove it at the end.

    Raises:
        VerifyUnusable: the directory cannot be created.
        VerifyRunning: another verification holds the lock.
    """
    path = os.path.join(config.state, verify_pods.DIRECTORY)
    try:
        os.makedirs(config.state, mode=0o711, exist_ok=True)
        os.makedirs(path, mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise VerifyUnusable(f"to use {path}", found=str(error.strerror)) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VerifyRunning(
                "to verify this node", found="another verification is running"
            ) from None
        for name in os.listdir(path):  # left by a run that was killed
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
