"""Decisions of the installer: backoff, validation files, probes, the engine's report."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from api.proto import cri_pb2 as pb
from integration.cri.engine import Engine, engine_of
from integration.kubernetes.backoff import CALM, FIRST, LONGEST, Backoff
from integration.kubernetes.errors import (
    InstallerUnwell,
    ValidationFileMalformed,
)
from integration.kubernetes.status import FILE, SILENCE, Log, State, Status, probe
from integration.kubernetes.validations import DriverReady, read_driver_ready
from integration.simulated.errors import ImageBuildFailed
from shim import RUNTIME_NAME
from tests.harness.launcher import REPOSITORY
from tests.harness.raising import raises
from tools.images import File, Link
from tools.node_image import node_image


def test_the_first_time_nothing_is_waited_and_then_twice_as_long_each_time() -> None:
    backoff = Backoff()
    now, waits = 1000.0, []
    for _ in range(9):
        due = backoff.due(now)
        waits.append(due - now)
        backoff.done(due)
        now = due
    assert waits == [0, 10, 20, 40, 80, 160, 320, 600, 600]
    assert (FIRST, LONGEST) == (10, 600)
    # That is less than a dozen rewrites in an hour; after a calm period the backoff is reset.
    assert backoff.due(now + CALM) == now + CALM
    assert backoff.is_calm(now + CALM)


def test_time_that_has_passed_counts_as_waited() -> None:
    backoff = Backoff()
    backoff.done(0)
    assert backoff.due(4) == FIRST
    assert backoff.due(FIRST + 1) == FIRST + 1


@pytest.mark.parametrize(
    ("content", "ready"),
    [
        (b"", DriverReady()),
        (
            b"IS_HOST_DRIVER=true\nNVIDIA_DRIVER_ROOT=/\nDRIVER_ROOT_CTR_PATH=/host\n",
            DriverReady("/", is_host_driver=True),
        ),
        (
            b"IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\n",
            DriverReady("/run/nvidia/driver"),
        ),
        (b"export NVIDIA_DRIVER_ROOT='/run/my driver'", DriverReady("/run/my driver")),
        (b"# nothing\n\nNVIDIA_DRIVER_ROOT=\n", DriverReady()),
        (b"\xff\xfe=\n", DriverReady()),
    ],
)
def test_driver_ready_is_read_and_never_executed(content: bytes, ready: DriverReady) -> None:
    assert read_driver_ready(content, "driver-ready") == ready


@pytest.mark.parametrize("root", ["$(touch", "`id`", '"/a', "run/nvidia"])
def test_a_root_that_is_no_path_is_an_error_and_no_command(root: str) -> None:
    with raises(ValidationFileMalformed) as caught:
        read_driver_ready(f"NVIDIA_DRIVER_ROOT={root}\n".encode(), "driver-ready")
    assert root in str(caught.value)


def _said(directory: Path, status: Status) -> str:
    (directory / FILE).write_text(json.dumps(asdict(status)))
    return str(directory)


@pytest.mark.parametrize(
    ("state", "silent", "alive", "ready"),
    [
        (State.READY, 0, True, True),
        (State.READY, SILENCE - 1, True, True),
        (State.READY, SILENCE + 1, False, False),
        (State.WAITING, 1, True, False),
        (State.NO_GPU, 1, True, True),
        (State.RESTART, 1, True, False),
        (State.FAILED, 1, True, False),
    ],
)
def test_a_probe_asks_whether_it_lives_and_whether_the_node_is_ready(
    tmp_path: Path, state: str, silent: float, alive: bool, ready: bool
) -> None:
    local = _said(tmp_path, Status(state=state, heard=5000 - silent))
    for question, well in (("alive", alive), ("ready", ready)):
        if well:
            assert probe(question, local, 5000).state == state
        else:
            with raises(InstallerUnwell):
                probe(question, local, 5000)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"other": 1}', "null"])
def test_a_file_that_makes_no_sense_is_no_sign_of_life(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with raises(InstallerUnwell):
        probe("alive", str(tmp_path), 0)
    with raises(InstallerUnwell):
        probe("alive", str(tmp_path / "missing"), 0)


def test_a_line_of_the_log_is_an_object_whatever_is_said() -> None:
    stream = io.StringIO()
    Log(stream).warning("a\nb", found="\x1b[31m\n\n", count=3)
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line) | {"time": ""} == {
        "time": "", "level": "warning", "event": "a\nb", "found": "?[31m", "count": 3,
    }  # fmt: skip


def _engine(info: dict[str, Any], handlers: list[str], version: str = "2.1.9") -> Engine:
    told = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in info.items()
    }
    return engine_of(
        pb.VersionResponse(runtime_name="containerd", runtime_version=version),
        pb.StatusResponse(
            info=told, runtime_handlers=[pb.RuntimeHandler(name=name) for name in handlers]
        ),
    )


def _config(*, cdi: bool | None = None, default: str = "runc", **runtimes: Any) -> dict[str, Any]:
    known = {} if cdi is None else {"enableCDI": cdi}
    table = {"runtimes": runtimes, "defaultRuntimeName": default}
    return {"config": {**known, "containerd": table}}


_OURS: dict[str, Any] = {
    "runtimeType": RUNTIME_NAME, "runtimePath": "", "PodAnnotations": None,
    "ContainerAnnotations": ["cdi.k8s.io/*"], "options": {"SystemdCgroup": True, "Root": ""},
}  # fmt: skip
_WANTED: dict[str, Any] = {
    "enable_cdi": True,
    "containerd": {
        "default_runtime_name": "runc",
        "runtimes": {
            "nvidia": {
                "runtime_type": RUNTIME_NAME, "runtime_path": "", "pod_annotations": [],
                "container_annotations": ["cdi.k8s.io/*"], "options": {"SystemdCgroup": True},
            }
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("info", "handlers", "lacking"),
    [
        (_config(cdi=True, nvidia=_OURS), [], []),
        (_config(cdi=False, nvidia=_OURS), ["nvidia"], ["enable_cdi = true"]),
        (
            _config(cdi=True, default="nvidia", nvidia=_OURS), [],
            ['containerd.default_runtime_name = "runc"'],
        ),
        (
            _config(cdi=True, nvidia={**_OURS, "runtimeType": "io.containerd.runc.v2"}), [],
            [f'containerd.runtimes.nvidia.runtime_type = "{RUNTIME_NAME}"'],
        ),
        (
            _config(cdi=True, nvidia={**_OURS, "options": {"SystemdCgroup": False}}), [],
            ['containerd.runtimes.nvidia.options = {"SystemdCgroup": true}'],
        ),
        (
            _config(cdi=True, nvidia={**_OURS, "PodAnnotations": ["a/*"]}), [],
            ["containerd.runtimes.nvidia.pod_annotations = []"],
        ),
        ({}, ["nvidia", ""], []),
        ({}, ["runc"], ["the handler nvidia"]),
        ({}, [], None),
        ({"config": "{"}, [], None),
        ({"config": []}, ["nvidia"], []),
    ],
)  # fmt: skip
def test_an_engine_lacks_what_it_was_not_started_with(
    info: dict[str, Any], handlers: list[str], lacking: list[str] | None
) -> None:
    assert _engine(info, handlers).lacks(_WANTED) == lacking


@pytest.mark.parametrize(
    ("version", "cdi", "reads"),
    [
        ("1.6.20~ds1", None, False),
        ("1.7.1", True, False),
        ("1.7.24~ds1", False, False),
        ("1.7.24~ds1", True, True),
        ("2.1.9+unknown", True, True),
        ("v2.3.0", False, False),
        ("2.9.0", None, None),
        ("unknown", True, None),
    ],
)
def test_an_engine_tells_whether_it_reads_cdi_names(
    version: str, cdi: bool | None, reads: bool | None
) -> None:
    assert _engine(_config(cdi=cdi, nvidia=_OURS), [], version).reads_cdi is reads


def test_an_engine_that_does_not_answer_is_not_one_that_does_not_tell(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    # In a new process: a forked child of a process that has used gRPC would hang until its timeout.
    for dead in (path, tmp_path / "missing"):
        ask = f"query_engine({str(dead)!r})"
        program = f"from integration.kubernetes.engine_query import query_engine; {ask}"
        argv = [sys.executable, "-c", program]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=REPOSITORY)
        assert done.stderr.splitlines()[-1] == f"ConnectionError: {dead}"


def test_the_image_holds_the_tree_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "tree/bin").mkdir(parents=True)
    program = tmp_path / "tree/bin/nvshim"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    os.symlink("bin", tmp_path / "tree/link")
    (tmp_path / "beside").write_text("not in it")
    image = node_image(str(tmp_path / "tree"))
    files = {path: node for path, node in image.tree.items() if isinstance(node, (File, Link))}
    assert files == {"nvshim/bin/nvshim": File(b"\x7fELF", 0o755), "nvshim/link": Link("bin")}
    assert image.entrypoint == ("/nvshim/bin/nvshim",)
    assert image.command == ("node-installer",)
    assert image.environment == {"PATH": "/nvshim/bin"}
    assert image.labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_what_cannot_be_in_an_image_is_never_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with raises(ImageBuildFailed, match="neither a file nor a link"):
        node_image(str(tmp_path))
    with raises(ImageBuildFailed, match="no such directory"):
        node_image(str(tmp_path / "missing"))
