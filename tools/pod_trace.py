"""Trace a pod from the kubelet's calls to the CUDA library.

``make pod-trace`` does what a kubelet does: it creates a sandbox and a container through the CRI,
with the handler ``nvidia``, on a real containerd and runc and a simulated GPU node. strace records
which programs are executed, and which driver files the container opens. The trace is written to
``docs/pictures/pod-trace.json``; the documentation shows it as a diagram.

Tracing makes everything slower, so the diagram shows the order, and not durations.

Source: strace(1); CRI v1.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from api.proto import cri_pb2 as pb
from integration.cri.client import Cri
from integration.simulated import Scenario, SimulatedNode
from shim import RUNTIME_NAME
from tools import REPOSITORY
from tools.containerd import PrivateContainerd
from tools.cri.plugin import CriContainerd, CriPlugin
from tools.images import GLIBC, PAUSE, glibc, pause, write_archive
from tools.parts import Parts

__all__ = ["diagram", "read_trace", "trace"]

SEEN: Final = os.path.join(REPOSITORY, "docs", "pictures", "pod-trace.json")
LANES: Final = ("kubelet", "containerd", "shim", "runc", "container")

_SHIM: Final = "containerd-shim-nvidia-v1"
_COMMAND: Final = ("probe", "dlopen", "libcuda.so.1")
# The tracer runs in the background, so that containerd keeps its own process id.
_WRAPPER: Final = """\
#!/bin/sh
case "$1" in --version) exec {containerd} --version;; esac
exec strace -D -f -ttt -s 256 -e trace=execve,openat -o {log} -A {containerd} "$@"
"""
_LINE: Final = re.compile(r"^\d+ +(\d+\.\d+) (execve|openat)\((.*)$")
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DRIVER_FILE: Final = re.compile(r"lib(?:cuda|nvidia)[^/]*\.so[^/]*$")


def trace(shim_directory: str) -> list[dict[str, Any]]:
    """Run a pod, and return the trace.

    Returns:
        The events, in order: each with ``ms`` since the first call, ``from``, ``to`` and
        ``what``.
    """
    with tempfile.TemporaryDirectory(prefix="pod-") as directory:
        parts = Parts.installed()
        log = os.path.join(directory, "strace")
        wrapper = os.path.join(directory, "containerd")
        with open(wrapper, "w", encoding="utf-8") as file:
            file.write(_WRAPPER.format(containerd=parts.containerd, log=log))
        os.chmod(wrapper, 0o700)
        plugin = CriPlugin({"nvidia": {"runtime_type": RUNTIME_NAME}}, sandbox_image=PAUSE)
        with (
            SimulatedNode.create(os.path.join(directory, "node"), Scenario.load("two")) as node,
            CriContainerd(
                shim_directory=shim_directory,
                shim_config=node.config_path,
                parts=replace(parts, containerd=wrapper),
                cri=replace(plugin, default_handler="nvidia"),
            ) as containerd,
            Cri(containerd.address) as cri,
        ):
            archive = write_archive(os.path.join(directory, "images.tar"), [glibc(), pause()])
            containerd.ctr("images", "import", archive, namespace="k8s.io")
            with open(node.config_path, "a", encoding="utf-8") as file:
                file.write('\n[policy]\ntrusted-namespaces = ["default"]\n')  # no kubelet runs here
            calls, ids = _run_pod(cri, containerd, node.scenario.gpus[0].uuid)
        with open(log, encoding="utf-8", errors="replace") as file:
            return _ordered(calls, read_trace(file, ids), calls[0][0])


def _run_pod(
    cri: Cri, containerd: PrivateContainerd, uuid: str
) -> tuple[list[tuple[float, str]], dict[str, str]]:
    calls: list[tuple[float, str]] = []
    # A pod without its own network, which other programs would create.
    namespaces = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER)
    config = pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name="pod", uid="pod", namespace="default"),
        log_directory=containerd.directory,
        linux=pb.LinuxPodSandboxConfig(
            security_context=pb.LinuxSandboxSecurityContext(namespace_options=namespaces)
        ),
    )
    container = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="cuda"),
        image=pb.ImageSpec(image=GLIBC),
        command=_COMMAND,
        envs=[pb.KeyValue(key="NVIDIA_VISIBLE_DEVICES", value=uuid.encode())],
        log_path="log",
        linux=pb.LinuxContainerConfig(
            security_context=pb.LinuxContainerSecurityContext(namespace_options=namespaces)
        ),
    )

    def call(function: Callable[..., Any], request: Any) -> Any:
        calls.append((time.time(), type(request).__name__.removesuffix("Request")))
        return function(request)

    known = pb.ImageStatusRequest(image=pb.ImageSpec(image=GLIBC))
    while not cri.image_status(known).HasField("image"):
        time.sleep(0.1)
    sandbox = call(
        cri.run_pod_sandbox, pb.RunPodSandboxRequest(config=config, runtime_handler="nvidia")
    ).pod_sandbox_id
    request = pb.CreateContainerRequest(
        pod_sandbox_id=sandbox, config=container, sandbox_config=config
    )
    cuda = call(cri.create_container, request).container_id
    call(cri.start_container, pb.StartContainerRequest(container_id=cuda))
    status = pb.ContainerStatusRequest(container_id=cuda)
    while cri.container_status(status).status.state != pb.CONTAINER_EXITED:
        time.sleep(0.02)
    call(cri.stop_pod_sandbox, pb.StopPodSandboxRequest(pod_sandbox_id=sandbox))
    call(cri.remove_pod_sandbox, pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
    return calls, {sandbox: "the sandbox", cuda: "the container"}


def read_trace(lines: Iterable[str], ids: dict[str, str]) -> list[tuple[float, str, str, str]]:
    """Return the pod's events in strace's output.

    Args:
        ids: of the sandbox and its container, with their names in the diagram.

    Returns:
        Time, source, target and description of each.
    """
    found = []
    opened = set()
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        when, call, rest = float(match[1]), match[2], match[3]
        words = _STRING.findall(rest)
        whose = next((name for key, name in ids.items() if key in rest), "")
        if call == "openat":
            name = os.path.basename(words[0]) if words else ""
            # Only the container's paths: the driver's directory on the node does not count.
            inside = bool(words) and words[0].startswith(("/usr/lib", "/lib"))
            missing = "ENOENT" in rest
            if inside and not missing and _DRIVER_FILE.match(name) and name not in opened:
                opened.add(name)
                found.append((when, "container", "container", f"opens {words[0]}"))
            continue
        program = os.path.basename(words[0]) if words else ""
        if program == _SHIM and words[-1:] != ["-v"]:
            verb = next((word for word in ("start", "delete") if word in words), "")
            if verb and whose:
                found.append((when, "containerd", "shim", f"executes {_SHIM} {verb}: {whose}"))
        elif program in {"runc", "crun"} and whose:
            verb = next((w for w in words if w in {"create", "start", "delete", "kill"}), "")
            if verb:
                found.append((when, "shim", "runc", f"executes {program} {verb}: {whose}"))
        elif words[1:] and (words[1] == _COMMAND[0] or words[0] == "/pause"):
            what = " ".join(words[1 : 1 + len(_COMMAND)]) if words[0] != "/pause" else "/pause"
            found.append((when, "runc", "container", f"becomes {what}"))
    return found


def _ordered(
    calls: list[tuple[float, str]], seen: list[tuple[float, str, str, str]], first: float
) -> list[dict[str, Any]]:
    asked = [(when, "kubelet", "containerd", name) for when, name in calls]
    return [
        {"ms": round((when - first) * 1000), "from": begin, "to": end, "what": what}
        for when, begin, end, what in sorted([*asked, *seen])
        if when >= first
    ]


def diagram() -> str:
    """Return the trace as a sequence diagram in Mermaid's language."""
    with open(SEEN, encoding="utf-8") as file:
        events = json.load(file)
    lines = [f"participant {lane}" for lane in LANES]
    lines += [f"{e['from']}->>{e['to']}: {e['ms']} ms: {e['what']}" for e in events]
    return "\n".join(["```mermaid", "sequenceDiagram", *lines, "```", ""])


def main() -> None:
    """Trace a pod, and write the trace."""
    events = trace(os.path.join(REPOSITORY, ".cache", "bin"))
    with open(SEEN, "w", encoding="utf-8") as file:
        json.dump(events, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
