"""The effect of each runtime option on a container, seen from outside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from api import typeurl
from api.errors import Status
from api.proto import runc_options_pb2, runtimeoptions_pb2
from api.ttrpc import RemoteError
from tests.harness.shim import ShimByHand, StartShim, content_of, gone

pytestmark = pytest.mark.anyio


def _runc(**options: Any) -> AnyMessage:
    return typeurl.pack(runc_options_pb2.Options(**options))


@pytest.mark.parametrize("kept", [False, True], ids=["new", "callers"])
async def test_a_container_has_a_session_keyring_of_its_own_unless_told_otherwise(
    start_shim: StartShim, *, kept: bool
) -> None:
    # runc names the keyring after the container, and root sees all keyrings.
    name = f"keys-{kept}-{os.getpid()}"
    async with start_shim(name, "sh", "-c", "cat /proc/keys > /keys") as shim:
        spec = shim.spec(name)
        spec["linux"]["maskedPaths"] = []
        shim.write_spec(name, spec)
        await shim.run(name, options=_runc(no_new_keyring=kept))
        await shim.call("Wait", id=name)
        keys = content_of(f"{shim.directory}/{name}/rootfs/keys").decode()
        assert "keyring" in keys
        assert (f"_ses.{name}" not in keys) is kept
        await shim.call("Delete", id=name)
        await gone(shim, name)


async def test_the_root_is_moved_and_not_pivoted_if_that_is_asked_for(
    start_shim: StartShim, tmp_path: Path
) -> None:
    async with start_shim("c1", "sh", "-c", "echo here > /there") as shim:
        said = tmp_path / "words"
        binary = tmp_path / "runc"
        binary.write_text(f'#!/bin/sh\necho "$@" >> {said}\nexec runc "$@"\n')
        binary.chmod(0o755)
        await shim.run("c1", options=_runc(binary_name=str(binary), no_pivot_root=True))
        assert (await shim.call("Wait", id="c1")).exit_status == 0
        assert " create " in said.read_text().splitlines()[0]
        assert " --no-pivot " in said.read_text().splitlines()[0]
        assert content_of(f"{shim.directory}/c1/rootfs/there") == b"here\n"


async def test_stdio_belongs_to_whom_the_options_name(shim: ShimByHand) -> None:
    await shim.run("c1", options=_runc(io_uid=1234, io_gid=4321))
    out = shim.fifo("out")
    reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    # runc later changes the owner to the process's user, but keeps the group.
    await shim.start_exec("c1", "e1", "stat", "-Lc", "%g", "/proc/self/fd/1", stdout=out)
    assert await shim.reap("c1", "e1") == 0
    assert os.read(reader, 100) == b"4321\n"
    os.close(reader)


@pytest.mark.skipif(os.path.isdir("/run/systemd/system"), reason="systemd runs here")
async def test_cgroups_by_systemd_are_refused_where_it_does_not_run(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        for options in (
            _runc(systemd_cgroup=True),
            typeurl.pack(runtimeoptions_pb2.Options(config_body=b"systemdcgroup = true")),
        ):
            with pytest.raises(RemoteError, match="NVSHIM-E1206") as caught:
                await shim.create("c1", options=options)
            assert caught.value.status == Status.FAILED_PRECONDITION
        await gone(shim, "c1")
        assert shim.events.names == []


@pytest.mark.skipif(os.path.isdir("/run/systemd/system"), reason="systemd runs here")
async def test_a_cgroup_named_as_systemds_is_one_like_another_where_it_does_not_run(
    shim: ShimByHand,
) -> None:
    spec = shim.spec("c1")
    name = f"nvshim-test-{os.getpid()}.slice:nvshim:c1"
    spec["linux"]["cgroupsPath"] = name
    shim.write_spec("c1", spec)
    pid = await shim.run("c1")
    assert name.encode() in content_of(f"/proc/{pid}/cgroup")


async def test_a_file_of_options_that_cannot_be_used_is_one_line(
    start_shim: StartShim, tmp_path: Path
) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    (tmp_path / "no TOML").write_text("SystemdCgroup: yes\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    async with start_shim("c1", "true") as shim:
        for name in ("missing", "directory", "fifo", "huge", "no TOML", "binary"):
            path = str(tmp_path / name)
            options = typeurl.pack(runtimeoptions_pb2.Options(config_path=path))
            with anyio.fail_after(60):
                with pytest.raises(RemoteError, match="NVSHIM-E1205") as caught:
                    await shim.create("c1", options=options)
            assert caught.value.status == Status.INVALID_ARGUMENT
            assert path in str(caught.value)
            assert "\n" not in str(caught.value)
