"""The bundle for GPU machines, on a simulated machine that has Python and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.simulated import SimulatedNode
from integration.tree import Tree
from tests.conftest import LOW_LEVEL, PARTS, RUNTIME
from tests.harness.launcher import REPOSITORY
from tests.harness.runtime import OURS
from tools.dist.payload import link_or_copy
from tools.gpu.bundle import build

# It starts some forty containers. Other tests check what it reports; test_dist.py checks that a
# tree runs on a bare machine; tests/unit/gpu_bundle tests the parts.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        (PARTS, LOW_LEVEL, RUNTIME) != ("installed", "runc", OURS), reason="has its own programs"
    ),
]


@pytest.fixture(scope="module")
def bundle(workshop: str, built_tree: Tree) -> str:
    return build(f"{workshop}/gpu-bundle", built_tree).path


def test_bundle_proves_what_it_can_on_a_machine_without_anything(
    bundle: str, two_gpus: SimulatedNode, tmp_path: Path
) -> None:
    for name in ("root", "out"):
        (tmp_path / name).mkdir()
    with open(two_gpus.config_path) as file:
        text = file.read().replace(two_gpus.state, "/tmp/state")
    (tmp_path / "config.toml").write_text(text)
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.harness.bare", str(tmp_path / "root"),
            "--read-only", f"{bundle}:/elsewhere",
            "--read-only", f"{two_gpus.directory}:{two_gpus.directory}",
            "--bind", f"{tmp_path}/out:/out",
            "--read-only", f"{tmp_path}/config.toml:/config.toml",
            "--", "/elsewhere/bin/run-on-gpu", "--config", "/config.toml",
            "--out", "/out", "--rounds", "1", "--shims", "1",
        ],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "out/report.json").read_text())
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert "failed" not in outcomes.values(), done.stdout
    listed = "nvidia-smi -L lists all GPUs on request"
    assert outcomes[listed] == "passed"
    gpu = two_gpus.scenario.gpus[1]
    assert outcomes[f"with GPU {gpu.index} alone, its node opens and no other node does"] == (
        "passed"
    )
    assert outcomes["GPUs still work after `runc update`"] == "passed"
    assert outcomes["a removed container leaves nothing"] == "passed"
    # Checks that need a kernel module are reported as not possible here.
    shown = {name for name, outcome in outcomes.items() if outcome == "passed"}
    assert not [name for name in shown if name.startswith(("CUDA computes", "EGL", "Vulkan"))]
    assert {n for n in shown if "alone: its libraries load" in n} == {
        f"`{name}` alone: its libraries load"
        for name in ("utility", "compute", "video", "graphics", "display", "ngx")
    }
    assert gpu.uuid in (tmp_path / "out/report.md").read_text()
    assert set(report["values"]["run_ms"]) >= {"containerd-shim-runc-v2"}
    assert (tmp_path / "out/containerd.log").stat().st_size > 0
    assert report["values"]["info"]["gpus"][1]["uuid"] == gpu.uuid
    assert (tmp_path / "out/doctor.tar.gz").stat().st_size > 0
    # Only this run's processes and mounts have the path in their names.
    (work,) = (row[1] for row in report["facts"]["The machine"] if row[0] == "containerd")
    assert _left_of(work) == set()


def test_a_bundle_that_is_not_whole_says_so(bundle: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    shutil.copytree(bundle, copy, symlinks=True, copy_function=link_or_copy)
    os.unlink(f"{copy}/image.tar")
    with open(f"{copy}/image.tar", "wb") as file:
        file.write(b"half of it")
    done = subprocess.run(
        [f"{copy}/bin/run-on-gpu", "--out", tmp_path / "out"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "NVSHIM-E2602" in done.stderr
    assert "image.tar is changed" in done.stderr
    assert not (tmp_path / "out").exists()


def _left_of(work: str) -> set[str]:
    """Return the processes and mounts of a run."""
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
                words = file.read()
        except OSError:
            continue
        if work in words:
            found.add(words)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        found |= {line for line in file if work in line}
    return found
