"""Checks of containers: the handler, exit codes, exec, and which GPUs they see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from hooks.config import Mode
from integration.cri.engine import CRIO
from integration.cri.errors import CriRefused
from integration.handlers import RUNTIME_TYPE, calls_our_shim
from integration.json_documents import parse_json
from integration.verify.node import Node
from integration.verify.outcomes import CheckFailed, CheckSkipped
from integration.verify.pods import Pod, ProcessResult
from integration.verify.probe import Report, parse
from integration.verify.visibility import (
    ExpectedDevice,
    faults_with_gpu,
    faults_without_gpu,
    gpu_numbers,
)

# Exit codes that no runtime or shell uses.
_CODE: Final = 42
_EXEC_CODE: Final = 43
_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
_CAPABILITIES: Final = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
_IN_USE: Final = ("NVSHIM-E0228",)


def handler_is_ours(node: Node) -> str:
    """Check that a pod starts with the handler, and that the shim runs it."""
    handler = node.handler
    if node.engine.handlers and handler not in node.engine.handlers:
        raise CheckFailed(
            f"{node.engine} has the handler {handler}",
            seen=f"it has {', '.join(filter(None, node.engine.handlers)) or 'none'}",
            do=_configure(node),
        )
    try:
        kind = node.pods.attempt(_runtime_type)
    except CriRefused as error:
        raise CheckFailed(
            f"a pod starts with the handler {handler}",
            seen=error.said,
            do=f"{_configure(node)}; see `nvshim doctor`",
        ) from error
    # With runtime_path set to the shim, the pod reports runc's type; the handler has the path.
    if kind and not calls_our_shim(kind, node.engine.handler(handler).get("runtimePath")):
        raise CheckFailed(
            f"the handler {handler} runs {RUNTIME_TYPE}",
            seen=f"it runs {kind}",
            do=_configure(node),
        )
    return f"{node.engine} ran a pod with the handler {handler}"


def _configure(node: Node) -> str:
    engine = "crio" if node.engine.name == CRIO else "containerd"
    return f"run `nvshim configure {engine}` and restart {engine}"


def _runtime_type(pod: Pod) -> str:
    """Return the type of a pod's runtime; "" if the engine does not report it."""
    try:
        info: Any = parse_json(pod.status().info.get("info", "null"))
    except ValueError:
        return ""
    return str(info.get("runtimeType") or "") if isinstance(info, dict) else ""


def exit_code_is_reported(node: Node) -> str:
    """Check that the engine reports a container's exit code."""

    def work(pod: Pod) -> None:
        ran = pod.run("exit", str(_CODE))
        if ran.code != _CODE:
            raise CheckFailed(
                f"a container exits with code {_CODE}",
                seen=f"exit code {ran.code}",
                do="see the engine's log for the container's exit event",
            )

    node.pods.attempt(work)
    return f"a container exited with {_CODE}, and the engine reported it"


def exec_works(node: Node) -> str:
    """Check that a command runs in a running container, with its output and exit code."""

    def work(pod: Pod) -> None:
        container = pod.start("hold")
        expected = f"an exec prints 'here' and exits with code {_EXEC_CODE}"
        try:
            ran = container.exec("echo", str(_EXEC_CODE))
        except CriRefused as error:
            raise CheckFailed(expected, seen=error.said, do=_SEE_EXEC) from error
        if (ran.code, ran.lines) != (_EXEC_CODE, ("here",)):
            seen = f"{len(ran.lines)} lines and exit code {ran.code}"
            raise CheckFailed(expected, seen=seen, do=_SEE_EXEC)

    node.pods.attempt(work)
    return "a command in a running container returned its output and its exit code"


_SEE_EXEC: Final = "see runc's or crun's error in the engine's log"


def no_gpu_without_request(node: Node) -> str:
    """Check that a container without a request sees no GPU and cannot open one."""
    numbers = device_numbers(node)

    def work(pod: Pod) -> None:
        report = report_from(pod.run("look", *numbers))
        if wrong := faults_without_gpu(report, node.inventory):
            raise CheckFailed(
                "a container without a request gets no device nodes or files of the driver",
                seen="; ".join(wrong),
                do="run `nvshim doctor` to find the hook, CDI file or runtime that adds them",
            )

    node.pods.attempt(work)
    return "a container without a request sees no GPU and can open none"


def each_gpu_is_isolated(node: Node) -> str:
    """Check that a container gets each GPU and MIG device that it requests, and no other."""
    busy, passed = [], []
    for device in node.devices:
        try:
            node.pods.attempt(partial(_check_isolated, node, device))
        except CriRefused as error:
            if not any(code in error.said for code in _IN_USE):
                raise CheckFailed(
                    f"a container with {device.name} starts",
                    seen=error.said,
                    do="run `nvshim explain CODE` for the error code, and `nvshim doctor`",
                ) from error
            busy.append(device.name)
        else:
            passed.append(device.name)
    if not passed:
        raise CheckSkipped(
            f"in use: {', '.join(busy)}" if busy else "no GPU is available to containers"
        )
    skipped = f"; in use: {', '.join(busy)}" if busy else ""
    return f"{', '.join(passed)}: each in a container that sees no other{skipped}"


def _check_isolated(node: Node, device: ExpectedDevice, pod: Pod) -> None:
    request = gpu_request(node, device)
    report = report_from(pod.run("look", *device_numbers(node), env=request, trusted=True))
    check_visibility(node, device, report, "a container that requests it")


def check_visibility(node: Node, device: ExpectedDevice, report: Report, what: str) -> None:
    """Check that a container sees a device and no other.

    Args:
        what: the container, as the message names it.

    Raises:
        CheckFailed: it does not see the device, or it sees another one.
    """
    if wrong := faults_with_gpu(report, device, node.inventory, node.opened_here()):
        raise CheckFailed(
            f"{what} sees and can open {device.name}, and no other device",
            seen="; ".join(wrong),
            do="run `nvshim doctor` to find the runtime, hook or CDI file that changes the devices",
        )


def gpu_request(node: Node, device: ExpectedDevice) -> Mapping[str, str]:
    """Return the environment with which a container requests a device.

    Raises:
        CheckSkipped: the policy trusts only containers that the kubelet created.
    """
    if node.config.mode == Mode.STRICT and not node.config.trusted_namespaces:
        raise CheckSkipped('policy.mode is "strict" and no namespace is trusted')
    return {_DEVICES: device.request, **_CAPABILITIES}


def device_numbers(node: Node) -> Sequence[str]:
    """Return the device numbers of all GPUs as arguments of the probe."""
    return [f"{major}:{minor}" for major, minor in sorted(gpu_numbers(node.inventory))]


def report_from(ran: ProcessResult) -> Report:
    """Parse what the probe in a container reported.

    Raises:
        CheckFailed: the probe exited with an error.
    """
    if ran.code:
        raise CheckFailed(
            "the probe in the container exits with 0",
            seen=f"exit code {ran.code}",
            do="see the engine's log",
        )
    return parse(ran.lines)
