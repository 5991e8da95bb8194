"""GitHub and pre-commit call the Makefile and ``.ci/run``, and do not copy their commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import REPOSITORY

ROOT = Path(REPOSITORY)


def parsed(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_workflow_runs_what_has_to_pass_before_a_change_lands() -> None:
    workflow = parsed(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci/run", os.X_OK)
    said = re.search(r"Starts on a fresh Debian (\d+) machine", (ROOT / ".ci/run").read_text())
    assert said is not None
    assert job["container"]["image"] == f"debian:{said[1]}"


def test_the_workflow_may_only_read() -> None:
    workflow = parsed(".github/workflows/ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in workflow["jobs"].values())
    # YAML 1.1 parses the key `on` as true. `pull_request_target` would run untrusted code with a
    # token that can write.
    assert set(workflow[True]) == {"push", "pull_request"}


def test_each_hook_of_pre_commit_is_a_part_of_make_lint() -> None:
    lint = (ROOT / "Makefile").read_text().partition("\nlint: ")[2].partition("\n\n")[0]
    hooks = [hook for each in parsed(".pre-commit-config.yaml")["repos"] for hook in each["hooks"]]
    assert hooks
    for hook in hooks:
        command = hook["entry"].removesuffix(" --force-exclude").removeprefix(".venv/")
        assert f"$(VENV)/{command} ." in lint


@pytest.mark.parametrize(
    ("path", "status"), [("tests/unit", 0), (f"{__file__}::test_x", 0), ("tests/no-such", 2)]
)
def test_a_path_that_does_not_exist_is_no_green_run(path: str, status: int) -> None:
    words = ["make", "--dry-run", "help", f"TESTS=tests/e2e {path}"]
    # Not with the flags of the make that runs the tests.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("MAKE")}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert ("tests/no-such: no such file or directory" in done.stderr) == bool(status)
