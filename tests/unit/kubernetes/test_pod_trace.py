"""Evaluating strace's log of a pod, and the diagram in the documentation."""

from __future__ import annotations

import json
import re

from tools.pod_trace import SEEN, diagram, read_trace

POD, CUDA = "a" * 64, "b" * 64
LOG = f"""\
7 10.5 execve("/bin/containerd-shim-nvidia-v1", ["/bin/containerd-shim-nvidia-v1", "-id", "{POD}", \
"start"], 0x0 /* 9 vars */) = 0
7 10.6 execve("/usr/bin/true", ["true"], 0x0) = 0
8 11.0 execve("/usr/sbin/runc", ["runc", "--root", "/r", "create", "{CUDA}"], 0x0 <unfinished ...>
9 12.0 execve("/usr/bin/probe", ["probe", "dlopen", "libcuda.so.1"], 0x0) = 0
9 12.1 openat(AT_FDCWD, "/lib/tls/libcuda.so.1", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or \
directory)
9 12.2 openat(AT_FDCWD, "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1", O_RDONLY|O_CLOEXEC) = 3
9 12.3 openat(AT_FDCWD, "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1", O_RDONLY|O_CLOEXEC) = 3
9 12.4 openat(AT_FDCWD, "/driver/libcuda.so.535.1", O_RDONLY|O_CLOEXEC) = 3
9 +++ exited with 0 +++
"""


def test_of_a_log_what_is_of_the_pod_is_told() -> None:
    assert read_trace(LOG.splitlines(), {POD: "the sandbox", CUDA: "the container"}) == [
        (10.5, "containerd", "shim", "executes containerd-shim-nvidia-v1 start: the sandbox"),
        (11.0, "shim", "runc", "executes runc create: the container"),
        (12.0, "runc", "container", "becomes probe dlopen libcuda.so.1"),
        (12.2, "container", "container", "opens /usr/lib/x86_64-linux-gnu/libcuda.so.535.1"),
    ]


def test_the_diagram_is_the_whole_way() -> None:
    # The kubelet's calls, our shim, runc, and the library in the container.
    lines = diagram().splitlines()
    steps = (
        "kubelet->>containerd: 0 ms: RunPodSandbox",
        "containerd->>shim: N ms: executes containerd-shim-nvidia-v1 start: the sandbox",
        "kubelet->>containerd: N ms: StartContainer",
        "shim->>runc: N ms: executes runc create: the container",
        "runc->>container: N ms: becomes probe dlopen libcuda.so.1",
        "container->>container: N ms: opens /usr/lib",
    )
    for step in steps:
        pattern = re.escape(step).replace("N\\ ms", r"\d+\ ms")
        assert any(re.match(pattern, line) for line in lines), step
    with open(SEEN, encoding="utf-8") as file:
        times = [event["ms"] for event in json.load(file)]
    assert times == sorted(times)
