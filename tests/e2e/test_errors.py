"""Bad input: the client gets one line that says what is wrong, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import api
from tests.harness.runtime import Runtime, new_name, one_line


def _refusal(runtime: Runtime, name: str, **options: Any) -> str:
    """Return the client's error when it creates the task."""
    with pytest.raises(api.ApiRefused) as refused:
        api.create_task(runtime.containerd, name, **options)
    message = str(refused.value)
    assert "\n" not in message.strip()
    assert "Traceback" not in message
    if runtime.is_ours and not _is_containerds_own(message):
        assert "NVSHIM-E" in message
    return message


def _is_containerds_own(message: str) -> bool:
    """Whether a containerd that checks the spec itself wrote the message."""
    return "failed to validate OCI runtime features" in message


@pytest.mark.parametrize(
    "content",
    [
        "null",
        '{"process": {"args": "true"}, "root": {"path": "rootfs"}}',
        '{"annotations": {"io.containerd.runc.v2.group": 7}}',
        '{"process": {"args": ["true"], "env": ["NVIDIA_VISIBLE_DEVICES=all", 7]}}',
    ],
)
def test_malformed_spec_is_refused(runtime: Runtime, content: str) -> None:
    # containerd reads a spec before it calls a shim; these specs get through.
    container = runtime.expect()
    api.create_container(
        runtime.containerd, container.name, runtime=runtime.name, spec=content.encode()
    )
    message = _refusal(runtime, container.name, mounts=[_tmpfs()])
    if _is_containerds_own(message):
        # containerd 2.0 to 2.2 starts a shim before it checks the spec, removes the bundle, and
        # forgets the shim. ctr prints the shim's name, from which the test finds its socket.
        container.remove()
        runtime.containerd.sweep()


@pytest.mark.parametrize(
    "content",
    [
        b'{"annotations": {"io.containerd.runc.v2.group": "pod"',
        b'["io.kubernetes.cri.sandbox-id"' + b"[" * 100_000,
    ],
    ids=["cut", "deep"],
)
def test_start_in_a_bundle_with_a_malformed_spec_is_refused(
    runtime: Runtime, shim_directory: str, tmp_path: Path, content: bytes
) -> None:
    if not runtime.is_ours:
        pytest.skip("calls the launcher itself")
    (tmp_path / "config.json").write_bytes(content)
    containerd = runtime.containerd
    argv = [
        os.path.join(shim_directory, "containerd-shim-nvidia-v1"),
        "-namespace", containerd.namespace, "-address", containerd.address,
        "-publish-binary", "/usr/bin/containerd", "-id", (name := new_name()), "start",
    ]  # fmt: skip
    containerd.ctr("containers", "info", name, check=False)  # the leak check would find its socket
    done = subprocess.run(
        argv, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("NVSHIM-E")
    assert len(done.stderr.splitlines()) == 1


def test_rootfs_that_cannot_be_mounted_is_refused(runtime: Runtime) -> None:
    container = runtime.expect()
    runtime.create_with_image(container.name, "true")
    message = _refusal(
        runtime, container.name, mounts=[("bind", "/no/such/rootfs", ("rbind", "ro"))]
    )
    assert "/no/such/rootfs" in message


def test_missing_runc_is_refused_by_name(runtime: Runtime, tmp_path: Path) -> None:
    flags = runtime.low_level_flags(str(tmp_path), binary="/no/such/runc")
    done = runtime.run("true", flags=flags)
    assert done.code == 1
    assert "/no/such/runc" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    if runtime.is_ours:
        assert "NVSHIM-E" in done.stderr


def test_failing_hook_of_the_spec_leaves_nothing(runtime: Runtime, tmp_path: Path) -> None:
    spec = runtime.spec("true")
    spec["hooks"] = {"createRuntime": [{"path": "/bin/false"}]}
    container = runtime.expect()
    api.create_container(
        runtime.containerd, container.name, runtime=runtime.name, spec=json.dumps(spec).encode()
    )
    message = _refusal(runtime, container.name, mounts=[_tmpfs()])
    assert "hook" in message


def test_start_that_fails_after_create_leaves_nothing(runtime: Runtime) -> None:
    # The program exists at create, and cannot be executed at start.
    done = runtime.run("/etc/passwd")
    assert done.code == 1
    # runc: exec /etc/passwd: permission denied; crun: open executable: Permission denied, or
    # the path `/etc/passwd` exists but it is not executable: Operation not permitted
    assert re.search("permission denied|not permitted", done.stderr, re.IGNORECASE)
    assert one_line(done)


def _tmpfs() -> tuple[str, str, tuple[str, ...]]:
    return ("tmpfs", "tmpfs", ("size=64k",))
