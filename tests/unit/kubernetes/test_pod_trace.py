"""What is made of strace's log of a pod, and the picture in the documentation."""

from __future__ import annotations

import json
import os
from xml.etree import ElementTree as ET

from integration.kubernetes.pod_trace import LANES, draw, read_trace
from tests.harness.launcher import REPOSITORY

PICTURES = os.path.join(REPOSITORY, "docs", "pictures")
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


def test_the_picture_is_drawn_from_what_was_seen() -> None:
    with open(os.path.join(PICTURES, "pod-trace.json"), encoding="utf-8") as file:
        events = json.load(file)
    with open(os.path.join(PICTURES, "pod-trace.svg"), encoding="utf-8") as file:
        picture = file.read()
    assert draw(events) == picture
    drawn = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    texts = [element.text for element in drawn]
    assert texts[: len(LANES)] == list(LANES)
    # The whole way: the kubelet's calls, our shim, runc, and the library in the container.
    whole = [f"{event['from']} {event['what']}" for event in events]
    for step in ("kubelet RunPodSandbox", "containerd executes containerd-shim-nvidia-v1 start",
                 "kubelet StartContainer", "shim executes runc create: the container",
                 "runc becomes probe dlopen libcuda.so.1", "container opens /usr/lib"):  # fmt: skip
        assert any(each.startswith(step) for each in whole), step
    assert [event["ms"] for event in events] == sorted(event["ms"] for event in events)
