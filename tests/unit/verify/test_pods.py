"""Pods of ``nvshim verify`` are removed, whenever it is interrupted."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, cast

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from api.proto import cri_pb2 as pb
from integration.cri.client import Cri
from integration.verify import pods
from integration.verify.errors import PodKept
from integration.verify.interrupts import Interrupts
from integration.verify.pods import LABEL, Pod, Pods, PodSettings
from tests.harness.grpc_server import serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Engine:
    """An engine with two pods, which refuses to remove ours a few times."""

    def __init__(self) -> None:
        self.pods = {"theirs": {}, "ours": {LABEL: "true"}}
        self.refusals = 0
        self.status = grpc.StatusCode.UNKNOWN

    def list(self, *_: object) -> pb.ListPodSandboxResponse:
        items = [
            pb.PodSandbox(id=name, labels=labels, metadata=pb.PodSandboxMetadata(name=name))
            for name, labels in self.pods.items()
        ]
        return pb.ListPodSandboxResponse(items=items)

    def stop(self, *_: object) -> pb.StopPodSandboxResponse:
        return pb.StopPodSandboxResponse()

    def remove(
        self, request: pb.RemovePodSandboxRequest, context: Any
    ) -> pb.RemovePodSandboxResponse:
        if self.refusals:
            self.refusals -= 1
            context.abort(self.status, "a container is in starting state")
        del self.pods[request.pod_sandbox_id]
        return pb.RemovePodSandboxResponse()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[Engine, Pods]]:
    it, path = Engine(), str(tmp_path / "c.sock")
    server = serve(
        path, "runtime.v1.RuntimeService",
        {
            "ListPodSandbox": (it.list, pb.ListPodSandboxRequest),
            "StopPodSandbox": (it.stop, pb.StopPodSandboxRequest),
            "RemovePodSandbox": (it.remove, pb.RemovePodSandboxRequest),
        },
    )  # fmt: skip
    with Cri(path) as cri:
        yield it, Pods(cri, PodSettings("", "", "", "", str(tmp_path)), Interrupts())
    server.stop()


def test_a_pod_that_cannot_be_removed_yet_is_removed_later(engine: tuple[Engine, Pods]) -> None:
    it, ours = engine
    it.refusals = 3
    ours.remove_all()
    assert list(it.pods) == ["theirs"]


@pytest.mark.parametrize("status", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_pod_that_the_engine_keeps_is_an_error_and_the_others_are_removed(
    engine: tuple[Engine, Pods], monkeypatch: pytest.MonkeyPatch, status: grpc.StatusCode
) -> None:
    it, ours = engine
    monkeypatch.setattr(pods, "_REMOVE_TIMEOUT", 0.0)
    it.pods["another"] = {LABEL: "true"}
    it.refusals, it.status = 1, status
    told = r"cannot remove ours of a verification: .*in starting state"
    with pytest.raises(PodKept, match=told):
        ours.remove_all()
    assert list(it.pods) == ["theirs", "ours"]


class SignallingEngine:
    """An engine during whose calls Ctrl-C is pressed."""

    def __init__(self) -> None:
        self.answered: list[str] = []

    def create_container(self, *_: object, **__: object) -> pb.CreateContainerResponse:
        signal.raise_signal(signal.SIGINT)
        self.answered.append("create")
        return pb.CreateContainerResponse(container_id="c1")

    def start_container(self, *_: object, **__: object) -> pb.StartContainerResponse:
        signal.raise_signal(signal.SIGINT)
        self.answered.append("start")
        return pb.StartContainerResponse()


def test_a_signal_does_not_give_up_the_start_of_a_container() -> None:
    """containerd 1.6 keeps such a container as CREATED, and cannot remove its pod any more."""
    it = SignallingEngine()
    with Interrupts() as interrupts:
        ours = Pods(cast("Cri", it), PodSettings("", "", "", "", ""), interrupts)
        with pytest.raises(KeyboardInterrupt):
            Pod(ours, "p1", pb.PodSandboxConfig()).start("hold")
    assert it.answered == ["create", "start"]
