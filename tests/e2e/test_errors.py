"""Bad input: one line at the client that says what is wrong, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import api
from tests.harness.runtime import Runtime, is_refused, new_name, one_line


def _refusal(runtime: Runtime, name: str, **options: Any) -> str:
    """What the client is told when the task is created."""
    with pytest.raises(api.ApiRefused) as refused:
        api.create_task(runtime.containerd, name, **options)
    message = str(refused.value)
    assert "\n" not in message.strip()
    assert "Traceback" not in message
    if runtime.is_ours and not _is_containerds_own(message):
        assert "NVSHIM-E" in message
    return message


def _is_containerds_own(message: str) -> bool:
    """Whether it is the word of a containerd that looked into the spec itself."""
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
    # containerd reads a spec before it calls a shim; this is what gets through.
    container = runtime.expect()
    api.create_container(
        runtime.containerd, container.name, runtime=runtime.name, spec=content.encode()
    )
    message = _refusal(runtime, container.name, mounts=[_tmpfs()])
    if _is_containerds_own(message):
        # containerd 2.0 to 2.2 starts a shim before it looks, removes the bundle, and forgets
        # the shim. Its name is told to ctr, by which its socket is known.
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
    containerd.ctr("containers", "info", name, check=False)  # its socket would be noticed
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


def test_second_mount_that_fails_takes_the_first_with_it(runtime: Runtime) -> None:
    container = runtime.expect()
    runtime.create_with_image(container.name, "true")
    mounts = [_tmpfs(), ("bind", "/no/such/rootfs", ("rbind", "ro"))]
    assert "/no/such/rootfs" in _refusal(runtime, container.name, mounts=mounts)


def test_missing_rootfs_is_refused_by_name(runtime: Runtime) -> None:
    done = runtime.run("true", image="/no/such/rootfs", flags=["--rootfs"])
    assert done.code == 1
    assert "/no/such/rootfs" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_missing_runc_is_refused_by_name(runtime: Runtime, tmp_path: Path) -> None:
    flags = runtime.low_level_flags(str(tmp_path), binary="/no/such/runc")
    done = runtime.run("true", flags=flags)
    assert done.code == 1
    assert "/no/such/runc" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    if runtime.is_ours:
        assert "NVSHIM-E" in done.stderr


def test_runtime_that_fails_without_a_word_is_an_error(runtime: Runtime, tmp_path: Path) -> None:
    done = runtime.run("true", flags=runtime.low_level_flags(str(tmp_path), binary="/bin/false"))
    assert done.code == 1
    assert len(done.stderr.splitlines()) == 1
    if runtime.is_ours:
        assert "false create" in done.stderr


def test_runtime_that_is_killed_half_way_leaves_nothing(runtime: Runtime, tmp_path: Path) -> None:
    wrapper = tmp_path / "runc"
    wrapper.write_text(
        '#!/bin/sh\ncase "$*" in *" create "*) kill -KILL $$;; *) exec runc "$@";; esac\n'
    )
    wrapper.chmod(0o755)
    done = runtime.run("true", flags=runtime.low_level_flags(str(tmp_path), binary=str(wrapper)))
    assert done.code == 1
    assert len(done.stderr.splitlines()) == 1


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
    # The program is found when the container is created and cannot be executed when started.
    done = runtime.run("/etc/passwd")
    assert done.code == 1
    # runc: exec /etc/passwd: permission denied; crun: open executable: Permission denied, or
    # the path `/etc/passwd` exists but it is not executable: Operation not permitted
    assert re.search("permission denied|not permitted", done.stderr, re.IGNORECASE)
    assert one_line(done)


def test_same_name_twice_is_refused_and_the_first_goes_on(runtime: Runtime) -> None:
    container = runtime.start_idle()
    done = runtime.run("true", name=container.name)
    assert done.code == 1
    assert "already exists" in done.stderr
    assert container.status == "RUNNING"


def test_kill_with_an_unknown_exec_is_refused(runtime: Runtime) -> None:
    container = runtime.start_idle()
    done = container.kill("KILL", flags=["--exec-id", new_name("e")])
    assert is_refused(done, "not found", "NVSHIM-E1303")
    assert container.status == "RUNNING"


def test_kill_of_a_container_that_has_ended_is_refused(runtime: Runtime) -> None:
    container = runtime.start("true")
    container.wait_for("STOPPED")
    done = container.kill("KILL")
    assert is_refused(done, "not found", "NVSHIM-E1305")


def _tmpfs() -> tuple[str, str, tuple[str, ...]]:
    return ("tmpfs", "tmpfs", ("size=64k",))


def test_nothing_listens_where_another_user_could_connect(runtime: Runtime) -> None:
    runtime.start_idle()
    with open("/proc/net/unix") as file:
        paths = [line.split()[7] for line in file if len(line.split()) > 7]
    assert not [path for path in paths if path.startswith("@") and "containerd" in path]
    directory = os.stat("/run/containerd/s")
    assert directory.st_uid == 0
    assert directory.st_mode & 0o022 == 0
