"""Paths that contain a zero byte, where the kernel would end the path."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from api import typeurl
from api.errors import Status
from api.proto import bootstrap_pb2, runc_options_pb2
from api.ttrpc import RemoteError
from integration.containers.shim_client import execute_verb, verb_words
from tests.harness.node import words_of
from tests.harness.runtime import is_alive
from tests.harness.shim import NAMESPACE, ShimByHand, StartShim

pytestmark = pytest.mark.anyio

PATH: Final = "/nowhere/a\0b"
# A missing path: code that stops at the zero byte must not mount anything.
BIND: Final = {"type": "bind", "source": "/nowhere", "options": ["rbind"]}

CREATES: Final[dict[str, dict[str, Any]]] = {
    "bundle": {"bundle": PATH},
    "stdin": {"stdin": PATH},
    "stdout": {"stdout": PATH},
    "stderr": {"stderr": f"file://{PATH}"},
    "checkpoint": {"checkpoint": PATH},
    "parent": {"checkpoint": "/nowhere", "parent_checkpoint": PATH},
    "mount's source": {"rootfs": [{**BIND, "source": PATH}]},
    "mount's type": {"rootfs": [{**BIND, "type": "bind\0"}]},
    "mount's target": {"rootfs": [{**BIND, "target": "\0"}]},
    "mount's option": {"rootfs": [{**BIND, "options": ["rbind", "\0"]}]},
    "runtime's root": {"options": typeurl.pack(runc_options_pb2.Options(root=PATH))},
    "CRIU's files": {"options": typeurl.pack(runc_options_pb2.Options(criu_work_path=PATH))},
}


async def test_create_is_refused_in_a_line_and_leaves_nothing(start_shim: StartShim) -> None:
    async with start_shim("c1", "true") as shim:
        for what, fields in CREATES.items():
            await _refused(shim, "Create", **{"bundle": f"{shim.directory}/c1", **fields})
            left = [f"socket {shim.socket_path}", f"process {shim.pid}"]
            assert shim.leftovers() == left, what


async def test_exec_and_checkpoint_are_refused_in_a_line(shim: ShimByHand) -> None:
    await shim.run("c1")
    spec = typeurl.pack_json({"args": ["true"], "cwd": "/", "user": {}}, typeurl.PROCESS)
    for stream in ("stdin", "stdout", "stderr"):
        await _refused(shim, "Exec", exec_id="e1", spec=spec, **{stream: PATH})
    await _refused(shim, "Checkpoint", path=PATH)
    for field in ("image_path", "work_path", "parent_path"):
        options = runc_options_pb2.CheckpointOptions()
        setattr(options, field, PATH)
        packed = typeurl.pack(options)
        await _refused(shim, "Checkpoint", path="/nowhere", options=packed)


@pytest.mark.parametrize(
    "field", ["containerd_grpc_address", "containerd_ttrpc_address", "socket_dir"]
)
def test_start_is_refused_in_a_line(shim_directory: str, tmp_path: Path, field: str) -> None:
    launcher = f"{shim_directory}/containerd-shim-nvidia-v1"
    address = f"{tmp_path}/c.sock"
    (tmp_path / "config.json").write_text("{}")
    params = bootstrap_pb2.BootstrapParams(
        instance_id="c1", namespace=NAMESPACE, containerd_grpc_address=address
    )
    setattr(params, field, PATH)
    try:
        done = execute_verb(
            verb_words(launcher, "start", namespace=NAMESPACE, address=address, container_id="c1"),
            str(tmp_path),
            stdin=params.SerializeToString(),
            environment={"PATH": os.environ["PATH"], "NVSHIM_FORK_SERVER": "0"},
        )
    finally:
        _end_shims()
    said = done.stdout.decode()
    assert done.returncode == 1, said
    assert said.startswith("NVSHIM-E1001 ")
    assert re.search(r"\. [A-Z]", said)
    assert "\n" not in said


ADDRESS: Final = {"version": 2, "address": f"unix://{PATH}", "protocol": "ttrpc"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("address", f"unix://{PATH}"),
        ("bootstrap.json", json.dumps(ADDRESS)),
        ("claim", PATH),
        ("init.pid", "\0\0\0\0"),
    ],
)
async def test_delete_cleans_up_whatever_a_file_of_the_bundle_says(
    shim: ShimByHand, name: str, content: str
) -> None:
    """As on a machine that lost power, whose files are full of zeros."""
    init = await shim.run("c1")
    os.kill(shim.pid, signal.SIGKILL)
    await shim.until_gone()
    bundle = Path(shim.directory, "c1")
    if name == "bootstrap.json":
        (bundle / "address").unlink()
    (bundle / name).write_text(content)
    shim.delete_verb("c1")
    assert not is_alive(init)
    # The path of its socket is lost.
    assert [left for left in shim.leftovers() if not left.startswith("socket ")] == []


def _end_shims() -> None:
    """Stop shims that were started anyway."""
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if NAMESPACE in words_of(pid):
            os.kill(pid, signal.SIGTERM)


async def _refused(shim: ShimByHand, method: str, **fields: Any) -> None:
    with pytest.raises(RemoteError) as caught:
        await shim.call(method, id="c1", **fields)
    said = str(caught.value)
    assert caught.value.status == Status.INVALID_ARGUMENT, said
    assert "\n" not in said
    assert "zero byte" in said
    assert re.search(r"\. [A-Z]", said)
