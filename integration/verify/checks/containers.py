"""Checks of containers: the handler, exit codes, exec, and who sees which GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hooks.config import Mode
from integration.cri.engine import CRIO
from integration.cri.errors import CriRefused
from integration.handlers import RUNTIME_TYPE, calls_our_shim
from integration.json_documents import parse_json
from integration.verify.node import Node
from integration.verify.outcomes import NotAsExpected, NotMade
from integration.verify.program import Report, parse
from integration.verify.visibility import Wanted, gpu_numbers, wrong_with, wrong_without

if TYPE_CHECKING:
    from integration.verify.pods import Pod, Ran

# Statuses that nobody else has.
_CODE: Final = 42
_EXEC_CODE: Final = 43
_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
_CAPABILITIES: Final = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
_IN_USE: Final = ("NVSHIM-E0228",)


def handler_answers(node: Node) -> str:
    """A pod runs by the handler, and it is our shim that runs it."""
    handler = node.handler
    if node.engine.handlers and handler not in node.engine.handlers:
        raise NotAsExpected(
            f"{node.engine} has the handler {handler}",
            seen=f"it has {', '.join(filter(None, node.engine.handlers)) or 'none'}",
            do=_configure(node),
        )
    try:
        kind = node.pods.attempt(_kind_of)
    except CriRefused as error:
        raise NotAsExpected(
            f"a pod of the handler {handler}",
            seen=error.said,
            do=f"{_configure(node)}; see `nvshim doctor`",
        ) from error
    # Of our program under runc's type the pod has the type, and only the handler has the path.
    if kind and not calls_our_shim(kind, node.engine.handler(handler).get("runtimePath")):
        raise NotAsExpected(
            f"the handler {handler} runs {RUNTIME_TYPE}",
            seen=f"it runs {kind}",
            do=_configure(node),
        )
    return f"{node.engine} ran a pod with the handler {handler}"


def _configure(node: Node) -> str:
    engine = "crio" if node.engine.name == CRIO else "containerd"
    return f"run `nvshim configure {engine}`, and restart {engine}"


def _kind_of(pod: Pod) -> str:
    """The type of a pod's runtime; "" if the engine does not tell."""
    try:
        told: Any = parse_json(pod.status().info.get("info", "null"))
    except ValueError:
        return ""
    return str(told.get("runtimeType") or "") if isinstance(told, dict) else ""


def exit_code_arrives(node: Node) -> str:
    """A container ends, and the engine tells its exit code."""

    def work(pod: Pod) -> None:
        ran = pod.run("exit", str(_CODE))
        if ran.code != _CODE:
            raise NotAsExpected(
                f"exit code {_CODE} of a container",
                seen=f"exit code {ran.code}",
                do="see the engine's log for the container's exit event",
            )

    node.pods.attempt(work)
    return f"a container ended with {_CODE}, and the engine says so"


def exec_arrives(node: Node) -> str:
    """A command runs in a running container; its output and its exit code arrive."""

    def work(pod: Pod) -> None:
        container = pod.start("hold")
        expected = f"'here' and exit code {_EXEC_CODE} of an exec"
        try:
            ran = container.exec("echo", str(_EXEC_CODE))
        except CriRefused as error:
            raise NotAsExpected(expected, seen=error.said, do=_SEE_EXEC) from error
        if (ran.code, ran.lines) != (_EXEC_CODE, ("here",)):
            seen = f"{len(ran.lines)} lines and exit code {ran.code}"
            raise NotAsExpected(expected, seen=seen, do=_SEE_EXEC)

    node.pods.attempt(work)
    return "a command in a running container wrote its line, and its exit code arrived"


_SEE_EXEC: Final = "see what runc or crun says of it in the engine's log"


def none_is_given(node: Node) -> str:
    """A container that asks for nothing has nothing of a GPU, and cannot open one."""
    numbers = numbers_of(node)

    def work(pod: Pod) -> None:
        report = report_of(pod.run("look", *numbers))
        if wrong := wrong_without(report, node.inventory):
            raise NotAsExpected(
                "a container without a request has nothing of the driver",
                seen="; ".join(wrong),
                do="see which hook, CDI file or runtime gives it: `nvshim doctor`",
            )

    node.pods.attempt(work)
    return "a container without a request sees none, and can open none"


def gpus_are_given(node: Node) -> str:
    """Each GPU and MIG device is given to a container that asks for it, and no other with it."""
    busy, given = [], []
    for device in node.devices:
        try:
            node.pods.attempt(partial(_is_given, node, device))
        except CriRefused as error:
            if not any(code in error.said for code in _IN_USE):
                raise NotAsExpected(
                    f"a container with {device.name}",
                    seen=error.said,
                    do="see `nvshim explain CODE` for the code, and `nvshim doctor`",
                ) from error
            busy.append(device.name)
        else:
            given.append(device.name)
    if not given:
        raise NotMade(f"in use: {', '.join(busy)}" if busy else "no GPU that can be given")
    beside = f"; in use: {', '.join(busy)}" if busy else ""
    return f"{', '.join(given)}: each in a container that sees no other{beside}"


def _is_given(node: Node, device: Wanted, pod: Pod) -> None:
    asked = gpu_asked_for(node, device)
    report = report_of(pod.run("look", *numbers_of(node), env=asked, trusted=True))
    check_sight(node, device, report, "a container that asks for it")


def check_sight(node: Node, device: Wanted, report: Report, what: str) -> None:
    """See that a container has a device, and no other.

    Args:
        what: which container, for people.

    Raises:
        NotAsExpected: it is not so.
    """
    if wrong := wrong_with(report, device, node.inventory, node.opened_here()):
        raise NotAsExpected(
            f"{what} sees {device.name}, can open it, and no other",
            seen="; ".join(wrong),
            do="see which runtime, hook or CDI file changes what the shim gives: `nvshim doctor`",
        )


def gpu_asked_for(node: Node, device: Wanted) -> Mapping[str, str]:
    """The environment by which a container asks for a device.

    Raises:
        NotMade: the policy believes no container that is not the kubelet's.
    """
    if node.config.mode == Mode.STRICT and not node.config.trusted_namespaces:
        raise NotMade('policy.mode is "strict", and no namespace is trusted')
    return {_DEVICES: device.request, **_CAPABILITIES}


def numbers_of(node: Node) -> Sequence[str]:
    """The numbers of all GPUs' nodes, as the program takes them."""
    return [f"{major}:{minor}" for major, minor in sorted(gpu_numbers(node.inventory))]


def report_of(ran: Ran) -> Report:
    """What a container has seen.

    Raises:
        NotAsExpected: it ended otherwise than by itself.
    """
    if ran.code:
        raise NotAsExpected(
            "the program in the container ends with 0",
            seen=f"exit code {ran.code}",
            do="see the engine's log",
        )
    return parse(ran.lines)
