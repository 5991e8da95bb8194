"""What the kubelet is answered: by the driver at work here, or by another that is.

Rules
- Of each claim that is asked about something is said, a refusal in the words of its error: the
  kubelet puts it into an event of the pod.
- The claims of one call are not done one after the other: the kubelet gives all of them 45 seconds.
- What is begun for a claim is not given up because the kubelet waits no more. It asks again, and
  the answer is there. Nor is it given up because the agent ends, if it takes no longer than
  :data:`TO_FINISH` seconds. After that the call has no answer, and whoever has passed it on makes
  it again.
- What takes nearly as long as the kubelet waits is answered with an error that says so, and goes
  on: daemons, nvidia-smi on each of several GPUs, and NVML may all be slow for one claim.
- A call that is passed on has a connection of its own, since another instance may be at work with
  the next one. One that was not answered because that instance has ended is made again, to whoever
  is at work then. Preparing a claim and taking it back bear that.
- Health is told whole at each change, and at least every ten seconds: the kubelet forgets a device
  that it has not heard of for thirty.

Source: Kubernetes kubelet pkg/kubelet/cm/dra; grpc.aio.
"""

from __future__ import annotations

import math
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import anyio.abc
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # it ships no types

from api.errors import NvshimError, one_line
from api.proto import dra_health_pb2 as health_pb
from api.proto import dra_pb2 as pb
from integration.agent_errors import ClaimUnfinished, DraFailed
from integration.grpc_anyio import answer_of
from integration.kubelet.grpc_server import serialize
from integration.node.state.topic import version_of, wait_any
from integration.node.values.claims import Reference
from integration.timeouts import PATIENCE
from integration.watcher import first_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator

    from integration.node.service import Context
    from integration.node.values.claims import Claim, Health

__all__ = ["TO_FINISH", "Answering", "Answers", "Ended", "Refused", "Relay", "answer_of_claim"]

TO_FINISH: Final = 5.0
"""Seconds that what was begun may take after the driver was told to end."""

_TO_ANSWER: Final = 40.0 * PATIENCE
_TOLD_AGAIN: Final = 10.0
_FORGOTTEN_AFTER: Final = 30
_LONGEST_MESSAGE: Final = 1024


class Answers(Protocol):
    """What the kubelet is answered."""

    async def prepare(self, reference: Reference) -> Claim:
        """Have a claim's devices be ready for its pods."""

    async def unprepare(self, reference: Reference) -> None:
        """Take back what was prepared; nothing if nothing was."""

    def health(self) -> Iterable[Health]:
        """What is thought of each device now."""

    def cdi_names(self, claim: Claim) -> Iterable[str]:
        """The CDI names of a claim's devices, in their order."""


class Ended(Exception):
    """The driver has ended before something was done."""


@dataclass(slots=True)
class _Work:
    """Something that is done for a claim."""

    what: str  # "prepare" or "unprepare"
    reference: Reference
    # what has come of it, and why nothing has; None while that is not known
    found: tuple[Any, str] | None = None
    done: anyio.Event = field(default_factory=anyio.Event)

    @property
    def title(self) -> str:
        """The claim, for people."""
        return f"{self.reference.namespace}/{self.reference.name}"


class Answering:
    """Answers, as long as the driver is at work.

    Args:
        tasks: where what is begun goes on.
    """

    def __init__(self, context: Context, answers: Answers, tasks: anyio.abc.TaskGroup) -> None:
        self._context = context
        self._answers = answers
        self._tasks = tasks
        self._ended = anyio.Event()
        self._under_way: set[anyio.CancelScope] = set()

    def end(self) -> None:
        """Have what is under way come to its end soon."""
        self._ended.set()
        for scope in self._under_way:
            scope.deadline = min(scope.deadline, anyio.current_time() + TO_FINISH)

    async def prepare(
        self, request: pb.NodePrepareResourcesRequest, *, knows_shares: bool
    ) -> pb.NodePrepareResourcesResponse:
        """The answer to NodePrepareResources.

        Args:
            knows_shares: whether the version of the API has shares.

        Raises:
            Ended: there is none.
        """
        answer = pb.NodePrepareResourcesResponse()
        for uid, (claim, error) in await self._all("prepare", request.claims):
            said = pb.NodePrepareResourceResponse(error=error)
            if claim is not None:
                names = self._answers.cdi_names(claim)
                said = answer_of_claim(claim, names, knows_shares=knows_shares)
            answer.claims[uid].CopyFrom(said)
        return answer

    async def unprepare(
        self, request: pb.NodeUnprepareResourcesRequest
    ) -> pb.NodeUnprepareResourcesResponse:
        """The answer to NodeUnprepareResources.

        Raises:
            Ended: there is none.
        """
        answer = pb.NodeUnprepareResourcesResponse()
        for uid, (_, error) in await self._all("unprepare", request.claims):
            answer.claims[uid].error = error
        return answer

    async def watch(self) -> AsyncGenerator[health_pb.NodeWatchResourcesResponse, None]:
        """The messages of NodeWatchResources."""
        state = self._context.state
        while not self._ended.is_set():
            version = version_of(state.dra_health)
            yield _told(self._answers.health())
            change = partial(wait_any, state.dra_health, since=version, timeout=_TOLD_AGAIN)
            await first_of(change, self._ended.wait)

    async def _all(
        self, what: str, claims: Iterable[pb.Claim]
    ) -> list[tuple[str, tuple[Any, str]]]:
        """What has come of something for each claim, by its UID, and why nothing has."""
        works = [_Work(what, Reference(each.namespace, each.uid, each.name)) for each in claims]
        for work in works:
            self._tasks.start_soon(self._do, work)
        with anyio.move_on_after(_TO_ANSWER):
            for work in works:
                await work.done.wait()
        found = []
        for work in works:
            if not work.done.is_set():
                late = ClaimUnfinished(
                    f"to {what} the claim {work.title}",
                    found=f"it has not ended after {_TO_ANSWER:g} s, and goes on",
                )
                self._context.say("warning", str(late))
                work.found = None, one_line(str(late))
            if work.found is None:
                raise Ended
            found.append((work.reference.uid, work.found))
        return found

    async def _do(self, work: _Work) -> None:
        """Do something, in a task of its own."""
        reference = work.reference
        do: Callable[[Reference], Awaitable[Any]] = getattr(self._answers, work.what)
        try:
            with self._goes_on():
                work.found = await do(reference), ""
        except NvshimError as error:
            work.found = None, one_line(str(error))
            self._context.say("warning", str(error), claim=work.title)
        except Exception as error:  # noqa: BLE001 - the server goes on, whatever it is
            failed = DraFailed(
                f"to {work.what} the claim {work.title}", found=f"{type(error).__name__}: {error}"
            )
            work.found = None, one_line(str(failed))
            self._context.say("error", str(failed), trace=traceback.format_exc())
        else:
            if work.found is not None:
                self._context.say("info", f"{work.what}d", claim=work.title, uid=reference.uid)
        finally:
            work.done.set()

    @contextmanager
    def _goes_on(self) -> Iterator[None]:
        """Let something go on for a while if the driver ends."""
        deadline = anyio.current_time() + TO_FINISH if self._ended.is_set() else math.inf
        with anyio.CancelScope(deadline=deadline, shield=True) as scope:
            self._under_way.add(scope)
            try:
                yield
            finally:
                self._under_way.discard(scope)


def _told(devices: Iterable[Health]) -> health_pb.NodeWatchResourcesResponse:
    now = int(time.time())
    told = health_pb.NodeWatchResourcesResponse()
    for each in devices:
        told.devices.add(
            device=health_pb.DeviceIdentifier(pool_name=each.pool, device_name=each.name),
            health=health_pb.HEALTHY if each.is_healthy else health_pb.UNHEALTHY,
            last_updated_time=now,
            health_check_timeout_seconds=_FORGOTTEN_AFTER,
            message=each.message[:_LONGEST_MESSAGE],
        )
    return told


def answer_of_claim(
    claim: Claim, cdi_names: Iterable[str], *, knows_shares: bool = True
) -> pb.NodePrepareResourceResponse:
    """What the kubelet is told of a claim that was prepared.

    Args:
        knows_shares: whether the version of the API has shares.
    """
    answer = pb.NodePrepareResourceResponse()
    for device, name in zip(claim.devices, cdi_names, strict=True):
        answer.devices.add(
            request_names=[device.request],
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=[name],
            share_id=device.share if device.share and knows_shares else None,
        )
    return answer


# What a call ends with whose server has ended.
_NO_ANSWER: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
# Channels that share connections share the pauses after failures too.
_OWN: Final = (("grpc.use_local_subchannel_pool", 1),)


class Refused(Exception):
    """What the instance at work answers with no message.

    Attributes:
        code: of gRPC.
        details: in words.
    """

    def __init__(self, error: Any) -> None:
        self.code, self.details = error.code(), error.details()
        super().__init__(self.details)


class Relay:
    """Leads to whoever is at work."""

    def __init__(self, path: str) -> None:
        self._target = f"unix:{path}"

    async def call(self, method: str, request: Any, kind: Any, timeout: float | None) -> Any:
        """Pass a call on.

        Args:
            timeout: seconds that it may take; None for any.

        Returns:
            The answer; None if nobody is at work now.

        Raises:
            Refused: there is none, and there will be none.
        """
        async with grpc.aio.insecure_channel(self._target, options=_OWN) as channel:
            ask = channel.unary_unary(
                method, request_serializer=serialize, response_deserializer=kind.FromString
            )
            try:
                return await answer_of(ask(request, timeout=timeout))
            except grpc.RpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise Refused(error) from error
                return None

    async def stream(self, method: str, request: Any, kind: Any) -> AsyncGenerator[Any, None]:
        """Pass on what is told, until whoever tells it has ended.

        Raises:
            Refused: nothing is told, and nothing will be.
        """
        async with grpc.aio.insecure_channel(self._target, options=_OWN) as channel:
            ask = channel.unary_stream(
                method, request_serializer=serialize, response_deserializer=kind.FromString
            )
            try:
                async for message in ask(request):
                    yield message
            except grpc.RpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise Refused(error) from error
