"""Verifying a node: what is needed for it, the checks in their order, and the outcome of each."""

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
from integration.cri.client import Cri
from integration.cri.engine import CRI_SOCKETS, Engine
from integration.cri.errors import CriError
from integration.nvml.inventory import inventory_of
from integration.verify.checks import CHECKS, Check
from integration.verify.errors import EngineMissing, NothingVerified, VerifyRunning, VerifyUnusable
from integration.verify.interrupts import Interrupts
from integration.verify.kubelet import Kubelet
from integration.verify.node import Node
from integration.verify.outcomes import NotAsExpected, NotMade, Outcome, Result
from integration.verify.pods import Place, Pods, find_image
from integration.verify.program import find_program
from shim import VERSION

_NAMESPACE: Final = "nvshim-verify"
_DIRECTORY: Final = "verify"
_SYSTEMD: Final = "SystemdCgroup"


@dataclass(frozen=True, slots=True)
class Asked:
    """How a node is verified."""

    handler: str  # the engine's
    cri_socket: str = ""  # where it serves the CRI; "" for the first place that has one
    checks: Sequence[Check] = CHECKS  # which, in their order
    restart_agent: bool = False  # whether the node agent may be restarted


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of it."""

    node: dict[str, Any]  # which node it is, as values that JSON has
    results: tuple[Result, ...]  # one for each check
    seconds: float  # that it took

    def count(self, outcome: Outcome) -> int:
        """How many checks ended so."""
        return sum(result.outcome is outcome for result in self.results)


def verify(config: Config, asked: Asked, say: Callable[[str], None]) -> Verification:
    """Verify this node. Nothing of it is left, however it ends.

    Args:
        config: of the shim.
        asked: how.
        say: told in some words what is being done.

    Raises:
        VerifyError: it cannot be done here.
        CriError: the engine does not answer, or does not let its pods be removed.
        NvshimError: the node has no driver.
    """
    began = time.monotonic()
    program = find_program()
    inventory = inventory_of(config, anew=True)
    with (
        Interrupts() as interrupts,
        _directory(config) as directory,
        Cri(_socket(asked.cri_socket)) as cri,
    ):
        say("asking the engine")
        engine = cri.engine()
        place = Place(
            handler=asked.handler,
            namespace=_namespace(config),
            image=find_image(cri),
            program=program,
            directory=directory,
            systemd=_is_systemd(cri, engine, asked.handler),
        )
        with Pods(cri, place, interrupts) as pods:
            node = Node(
                config, inventory, engine, pods, Kubelet(config),
                restart_agent=asked.restart_agent,
            )  # fmt: skip
            results = tuple(_results(node, asked.checks, say))
    if all(result.outcome is Outcome.SKIPPED for result in results):
        raise NothingVerified(
            "to verify this node",
            found="; ".join(f"{result.name}: {result.told}" for result in results)
            or "no check was asked for",
            do="ask for others, with --only or without",
        )
    return Verification(_described(node), results, round(time.monotonic() - began, 1))


def _results(node: Node, checks: Sequence[Check], say: Callable[[str], None]) -> Iterator[Result]:
    """Make the checks; one is left out whose needs have failed, or were left out for that."""
    unfit: set[str] = set()
    for check in checks:
        say(f"{check.name}: {check.title}")
        lacking = [name for name in check.needs if name in unfit]
        if lacking:
            result = Result(
                check.name, check.title, Outcome.SKIPPED, told=f"it needs: {', '.join(lacking)}"
            )
        else:
            result = _made(check, node)
        if lacking or result.outcome is Outcome.FAILED:
            unfit.add(check.name)
        yield result
    say("")


def _made(check: Check, node: Node) -> Result:
    began = time.monotonic()

    def result(outcome: Outcome, **texts: str) -> Result:
        seconds = round(time.monotonic() - began, 1)
        return Result(check.name, check.title, outcome, seconds=seconds, **texts)

    def failed(error: NotAsExpected) -> Result:
        return result(Outcome.FAILED, expected=error.expected, seen=error.seen, do=error.do)

    try:
        return result(Outcome.PASSED, told=check.make(node))
    except NotMade as error:
        return result(Outcome.SKIPPED, told=error.why)
    except NotAsExpected as error:
        return failed(error)
    except CriError as error:
        do = error.do or "see the engine's log, and `nvshim doctor`"
        return failed(NotAsExpected(check.title, seen=f"{error.asked}: {error.found}", do=do))


def _described(node: Node) -> dict[str, Any]:
    """Which node it is, without what tells it from others of its kind."""
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
    """Where the engine serves the CRI.

    Raises:
        EngineMissing: nowhere.
    """
    places = (named.removeprefix("unix://"),) if named else CRI_SOCKETS
    for path in places:
        if os.path.exists(path):
            return path
    raise EngineMissing("an engine that runs pods", found=f"no socket {' or '.join(places)}")


def _namespace(config: Config) -> str:
    """Of the pods; where no request of a privileged container is believed, one that is trusted."""
    trusted = config.trusted_namespaces
    return trusted[0] if config.mode == Mode.STRICT and trusted else _NAMESPACE


def _is_systemd(cri: Cri, engine: Engine, handler: str) -> bool:
    """Whether cgroups of the handler are systemd's: their names are of another kind."""
    with contextlib.suppress(CriError):  # containerd 1 does not know the call
        driver = cri.runtime_config(pb.RuntimeConfigRequest()).linux.cgroup_driver
        return driver == pb.SYSTEMD
    options = engine.handler(handler).get("options")
    return isinstance(options, dict) and options.get(_SYSTEMD) is True


@contextlib.contextmanager
def _directory(config: Config) -> Iterator[str]:
    """A directory for the logs of pods, which is removed at the end. Who has it is alone.

    Raises:
        VerifyUnusable: it cannot be made.
        VerifyRunning: somebody else has it.
    """
    path = os.path.join(config.state, _DIRECTORY)
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
            raise VerifyRunning("to verify this node", found="somebody does already") from None
        for name in os.listdir(path):  # of a run that was killed
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
