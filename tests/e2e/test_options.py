"""The runtime's options: another low-level runtime, and another directory for its state."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.harness import api
from tests.harness.low_level import crun_for_this_host
from tests.harness.runtime import Runtime, new_name, one_line

# The state files of each low-level runtime.
RUNC_STATE, CRUN_STATE = "state.json", "status"


@pytest.fixture
def crun(runtime: Runtime, tmp_path: Path) -> str:
    """Return a crun that runs on this host and accepts this containerd's specs."""
    program = runtime.containerd.parts.crun
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    spec = runtime.spec("true")["ociVersion"]
    if said.stdout.startswith("crun version 1.8.") and not spec.startswith("1.0."):
        pytest.skip(f"crun 1.8 takes specs of version 1.0 only, and this containerd writes {spec}")
    return crun_for_this_host(str(tmp_path), program)


def _state(runtime: Runtime, container: str) -> set[str]:
    root = os.path.join(runtime.containerd.directory, "runc", runtime.containerd.namespace)
    return set(os.listdir(os.path.join(root, container)))


def test_state_of_the_low_level_runtime_is_where_it_was_asked_for(
    runtime: Runtime, tmp_path: Path
) -> None:
    root = os.path.join(runtime.containerd.directory, "runc")
    container = runtime.start_idle(flags=runtime.low_level_flags(str(tmp_path), root=root))
    assert RUNC_STATE in _state(runtime, container.name)
    assert container.exec("echo", "here").stdout == "here\n"


def test_crun_serves_exec_kill_and_delete(runtime: Runtime, tmp_path: Path, crun: str) -> None:
    root = os.path.join(runtime.containerd.directory, "runc")
    flags = runtime.low_level_flags(str(tmp_path), binary=crun, root=root)
    container = runtime.start_idle(flags=flags)
    assert CRUN_STATE in _state(runtime, container.name)
    assert container.exec("sh", "-c", "echo here; exit 3").code == 3
    runtime.containerd.ctr("tasks", "pause", container.name)
    assert container.status == "PAUSED"
    runtime.containerd.ctr("tasks", "resume", container.name)
    container.kill("KILL")
    assert container.exit_code() == 128 + 9


def test_missing_program_of_crun_is_a_readable_error(
    runtime: Runtime, tmp_path: Path, crun: str
) -> None:
    done = runtime.run("no-such-program", flags=runtime.low_level_flags(str(tmp_path), binary=crun))
    assert done.code == 1
    assert "no-such-program" in done.stderr
    assert one_line(done)


def test_container_in_a_user_namespace_of_its_own(runtime: Runtime) -> None:
    if runtime.maps_no_ids:
        pytest.skip("containerd 2 takes any options for runc's where ids are mapped")
    # The options also set the owner of the container's stdio, separately in containerd 1.x.
    mapped = "0:100000:65536"
    container = runtime.start_idle(flags=["--uidmap", mapped, "--gidmap", mapped])
    with open(f"/proc/{container.pid}/uid_map") as file:
        assert file.read().split() == mapped.split(":")
    assert os.stat(f"/proc/{container.pid}").st_uid == 100000
    assert container.exec("id", "-u").stdout == "0\n"
    assert container.exec("sh", "-c", "echo here >/tmp/file; stat -c %u /tmp/file").stdout == "0\n"
    container.kill("KILL")
    assert container.exit_code() == 128 + 9


def test_options_in_the_form_of_docker_are_understood(runtime: Runtime) -> None:
    root = os.path.join(runtime.containerd.directory, "runc")
    container = runtime.expect()
    runtime.create_with_image(container.name, "sleep", "1000")
    mounts = runtime.prepare_rootfs(container.name)
    api.create_task(
        runtime.containerd,
        container.name,
        mounts=mounts,
        options=api.runc_options(root=root),
    )
    assert container.status == "CREATED"
    assert RUNC_STATE in _state(runtime, container.name)
    api.start_task(runtime.containerd, container.name)
    assert container.status == "RUNNING"


def test_options_that_nobody_knows_are_refused_by_name(runtime: Runtime) -> None:
    container = runtime.expect()
    runtime.create_with_image(container.name, "true")
    mounts = runtime.prepare_rootfs(container.name)
    unknown = api.any_message("example.v1.Options" + new_name(), b"\x0a\x01x")
    with pytest.raises(api.ApiRefused) as refused:
        api.create_task(runtime.containerd, container.name, mounts=mounts, options=unknown)
    assert "example.v1.Options" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_malformed_file_of_options_is_a_typed_error(runtime: Runtime, tmp_path: Path) -> None:
    if not runtime.is_ours:
        pytest.skip("ctr gives containerd's own shim no such file")
    path = tmp_path / "options.toml"
    path.write_text("BinaryNaem = 'runc'\n")
    done = runtime.run("true", flags=["--runtime-config-path", str(path)])
    assert done.code == 1
    assert "NVSHIM-E" in done.stderr
    assert "BinaryNaem" in done.stderr
    assert len(done.stderr.splitlines()) == 1
