"""Fixtures for tests of containerd's configuration."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.engines import cri_trial, programs
from integration.engines import effective_config as dump
from integration.engines.programs import run
from tests.harness.etc_containerd import Etc
from tools.parts import Parts


@pytest.fixture(scope="module")
def asked_once() -> Iterator[None]:
    """Ask each containerd only once for its version, and for the dump of the same files.

    What is installed on the machine is queried every time.
    """
    answers: dict[tuple[str, ...], subprocess.CompletedProcess[str]] = {}

    def ask(argv: list[str]) -> subprocess.CompletedProcess[str]:
        directory = os.path.dirname(argv[2]) if "--config" in argv else "/nowhere"
        texts = []
        for path in sorted(filter(os.path.isfile, glob.glob(f"{directory}/*"))):
            with open(path, newline="") as file:
                texts.append(file.read())
        key = tuple(text.replace(directory, "{directory}") for text in (*argv, *texts))
        if key not in answers:
            done = run(argv)
            done.stdout, done.stderr = (
                said.replace(directory, "{directory}") for said in (done.stdout, done.stderr)
            )
            answers[key] = done
        found = answers[key]
        out, error = (
            said.replace("{directory}", directory) for said in (found.stdout, found.stderr)
        )
        return subprocess.CompletedProcess(argv, found.returncode, out, error)

    with pytest.MonkeyPatch.context() as patch:
        for module in (dump, programs, cri_trial):
            patch.setattr(module, "run", ask)
        yield


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str, str | None], Etc]:
    def make(release: str, root: str | None) -> Etc:
        node = Etc(str(tmp_path), Parts.named(release).containerd)
        if root is not None:
            node.write(root.replace("{directory}", node.directory))
        return node

    return make
