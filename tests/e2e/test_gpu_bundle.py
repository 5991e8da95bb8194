"""The bundle for machines with a GPU, on a simulated one that has Python and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from integration.gpu.bundle import build
from integration.simulated import Scenario, SimulatedNode
from tests.conftest import LOW_LEVEL, PARTS, RUNTIME
from tests.harness import bare
from tests.harness.launcher import REPOSITORY, SITE
from tests.harness.runtime import OURS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    (PARTS, LOW_LEVEL, RUNTIME) != ("installed", "runc", OURS), reason="has its own programs"
)


@pytest.fixture(scope="module")
def bundle(workshop: str) -> str:
    return build(f"{workshop}/gpu-bundle", site=SITE)


@pytest.fixture(scope="module")
def node(workshop: str) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/gpus", Scenario.load("two")) as node:
        yield node


# It starts some forty containers.
@pytest.mark.timeout(120)
def test_bundle_proves_what_it_can_on_a_machine_without_anything(
    bundle: str, node: SimulatedNode, tmp_path: Path
) -> None:
    before = _of_ours()
    for name in ("root", "out"):
        (tmp_path / name).mkdir()
    with open(node.config_path) as file:
        text = file.read().replace(node.state, "/tmp/state")
    (tmp_path / "config.toml").write_text(text)
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.harness.bare", str(tmp_path / "root"),
            "--read-only", f"{bundle}:/elsewhere",
            "--read-only", f"{node.directory}:{node.directory}",
            "--bind", f"{tmp_path}/out:/out", "--read-only", f"{tmp_path}/config.toml:/config.toml",
            "--", bare.INTERPRETER, "/elsewhere/run-on-gpu", "--config", "/config.toml",
            "--out", "/out", "--rounds", "1", "--shims", "1",
        ],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
        env={**os.environ, "NVSHIM_TEST_OF_PYTHON": bare.of_python()},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "out/report.json").read_text())
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert "failed" not in outcomes.values(), done.stdout
    listed = "nvidia-smi -L lists all GPUs if all are asked for"
    assert outcomes[listed] == "passed"
    gpu = node.scenario.gpus[1]
    assert outcomes[f"with GPU {gpu.index} alone, its node opens and no other can be made to"] == (
        "passed"
    )
    assert outcomes["GPUs still work after `runc update`"] == "passed"
    assert outcomes["a container that was removed leaves nothing"] == "passed"
    # What wants a kernel module cannot be shown here, and is not claimed.
    shown = {name for name, outcome in outcomes.items() if outcome == "passed"}
    assert not [name for name in shown if name.startswith(("CUDA computes", "EGL", "Vulkan"))]
    assert {n for n in shown if "alone: its libraries load" in n} == {
        f"`{name}` alone: its libraries load"
        for name in ("utility", "compute", "video", "graphics", "display", "ngx")
    }
    assert gpu.uuid in (tmp_path / "out/report.md").read_text()
    assert set(report["values"]["run_ms"]) >= {"containerd-shim-runc-v2"}
    assert (tmp_path / "out/containerd.log").stat().st_size > 0
    assert _of_ours() == before


def test_a_bundle_that_is_not_whole_says_so(bundle: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(os.path.join(bundle, "run-on-gpu"), copy)
    (copy / "lib").symlink_to(os.path.join(bundle, "lib"))
    (copy / "payload.tar").write_bytes(b"half of it")
    with open(os.path.join(bundle, "manifest.json")) as file:
        (copy / "manifest.json").write_text(file.read())
    done = subprocess.run(
        [copy / "run-on-gpu", "--out", tmp_path / "out"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "NVSHIM-E2463" in done.stderr
    assert "another digest" in done.stderr
    assert not (tmp_path / "out").exists()


def _of_ours() -> set[str]:
    """The processes, mounts and cgroups that a run could leave."""
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                words = file.read()
        except OSError:
            continue
        if "nvshim-gpu-" in words:
            found.add(words)
    with open("/proc/self/mountinfo") as file:
        found |= {line for line in file if "nvshim-gpu-" in line}
    return found
