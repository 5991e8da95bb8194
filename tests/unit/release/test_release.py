"""A release's metadata and signature, and the conditions under which none is made."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
import yaml

from hooks.node import cache
from shim import VERSION
from tests.harness.kubectl import MANIFESTS
from tests.harness.launcher import REPOSITORY
from tests.harness.raising import raises
from tools.dist import debian, rpm
from tools.dist.inputs import Inputs
from tools.dist.project import PLACEHOLDER
from tools.errors import ReleaseNotReady, SignatureFailed
from tools.release.provenance import statement
from tools.release.readiness import placeholders, problems, require_ready
from tools.release.signing import SIGNATURE, SUMS, sign, verifies, write_sums

if TYPE_CHECKING:
    from pathlib import Path

INPUTS: Final = Inputs(
    source=REPOSITORY, version="1.2.0", revision="abc1234", epoch=1_700_000_000,
    architecture="amd64",
)  # fmt: skip


def _read(*names: str) -> str:
    with open(os.path.join(REPOSITORY, *names), encoding="utf-8") as file:
        return file.read()


def test_everything_that_says_the_version_says_the_same() -> None:
    project = tomllib.loads(_read("pyproject.toml"))["project"]
    images = [
        image
        for name in ("base", "verify")
        for image in yaml.safe_load(_read(MANIFESTS, name, "kustomization.yaml"))["images"]
    ]
    changes = re.search(r"^## \[(\d\S*)\] - ", _read("CHANGELOG.md"), re.MULTILINE)
    assert changes
    assert {
        project["version"], changes[1], cache.RELEASE, *(image["newTag"] for image in images)
    } == {VERSION}  # fmt: skip
    said = subprocess.check_output(
        [sys.executable, "-m", "integration.cli", "--version"], cwd=REPOSITORY, text=True
    )
    assert said == f"nvshim {VERSION}\n"
    supported = re.search(r"^\| (\d+\.\d+) \| until", _read("SECURITY.md"), re.MULTILINE)
    assert supported
    assert VERSION.startswith(f"{supported[1]}.")


# -- refused releases -----------------------------------------------------------------------


# The heading of a version that is ready, below that of unreleased changes.
DATED: Final = "## [1.2.0] - 2026-11-25"


def _checkout(path: Path, *, changes: str, tag: str = "", more: str = "") -> Inputs:
    def git(*words: str) -> None:
        about = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", "-C", path, *about, *words], check=True, capture_output=True)

    (path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (path / "CHANGELOG.md").write_text(f"# Changelog\n\n{changes}\n\n## [1.1.0] - 2026-01-01\n")
    (path / "README.md").write_text(more)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "x")
    if tag:
        git("tag", tag)
    return Inputs.of(str(path))


def test_a_tagged_commit_that_lacks_nothing_is_a_release(tmp_path: Path) -> None:
    inputs = _checkout(tmp_path, changes=DATED, tag="v1.2.0")
    assert require_ready(inputs, key="/key") == []


def test_a_release_may_have_an_empty_section_for_what_comes_next(tmp_path: Path) -> None:
    inputs = _checkout(tmp_path, changes=f"## [Unreleased]\n\n{DATED}", tag="v1.2.0")
    assert require_ready(inputs, key="/key") == []


@pytest.mark.parametrize(
    ("changes", "more", "key", "found"),
    [
        ("## [1.2.0] - unreleased", "", "/key", "begins with “[1.2.0] - unreleased”"),
        ("", "", "/key", "begins with “[1.1.0] - 2026-01-01”"),
        (f"## [Unreleased]\n\n- one\n\n{DATED}", "", "/key", "has entries below [Unreleased]"),
        (DATED, f"https://{PLACEHOLDER}/", "/key", "1 addresses are placeholders"),
        (DATED, "", "", "no key"),
    ],
)
def test_a_tagged_commit_that_lacks_something_is_refused(
    tmp_path: Path, changes: str, more: str, key: str, found: str
) -> None:
    inputs = _checkout(tmp_path, changes=changes, tag="v1.2.0", more=more)
    with raises(ReleaseNotReady) as raised:
        require_ready(inputs, key=key)
    assert raised.value.found.count(";") == 0
    assert found in raised.value.found


def test_any_other_commit_is_a_preview_that_says_why(tmp_path: Path) -> None:
    inputs = _checkout(tmp_path, changes=DATED)
    assert require_ready(inputs, key="/key") == [f"{inputs.revision} is not tagged v1.2.0"]
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n\n')
    assert any(
        "-dirty is not tagged" in line for line in problems(Inputs.of(str(tmp_path)), key="")
    )


def test_every_address_that_is_to_be_filled_in_is_named(tmp_path: Path) -> None:
    _checkout(tmp_path, changes="## [1.2.0] - unreleased", more=f"one\nhttps://{PLACEHOLDER}/x\n")
    assert placeholders(str(tmp_path)) == [f"README.md:2: https://{PLACEHOLDER}/x"]
    named = {line.partition(":")[0] for line in placeholders()}
    assert {"pyproject.toml", "SECURITY.md", "CODE_OF_CONDUCT.md", "RELEASE_KEYS"} <= named


# -- metadata -------------------------------------------------------------------------------


def test_the_provenance_names_every_file_and_what_it_was_made_of(tmp_path: Path) -> None:
    (tmp_path / "a.deb").write_bytes(b"a")
    (tmp_path / "libc6_2%3a1_amd64.deb").write_bytes(b"libc")
    packages = {"libc6_2%3a1_amd64.deb": str(tmp_path / "libc6_2%3a1_amd64.deb")}
    made = statement(INPUTS, str(tmp_path), ["a.deb"], packages, "0" * 40)
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert made["predicateType"] == "https://slsa.dev/provenance/v1"
    assert made["subject"] == [
        {"name": "a.deb", "digest": {"sha256": hashlib.sha256(b"a").hexdigest()}}
    ]
    build = made["predicate"]["buildDefinition"]
    assert build["externalParameters"]["released"] is False
    of = {each["uri"]: each["digest"] for each in build["resolvedDependencies"]}
    assert of["pkg:deb/debian/libc6@2:1?arch=amd64"] == {
        "sha256": hashlib.sha256(b"libc").hexdigest()
    }
    assert {"gitCommit": "0" * 40} in of.values()
    assert "file:requirements/node.txt" in of
    unknown = statement(INPUTS, str(tmp_path), ["a.deb"], packages, "")
    (git,) = (
        each
        for each in unknown["predicate"]["buildDefinition"]["resolvedDependencies"]
        if each["uri"].startswith("git+")
    )
    assert "digest" not in git


# -- signatures -----------------------------------------------------------------------------


def _key(path: Path, name: str) -> str:
    key = str(path / name)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
    return key


@pytest.fixture
def release(tmp_path: Path) -> Path:
    path = tmp_path / "release"
    path.mkdir()
    (path / "a").write_text("a")
    (path / "b").write_text("b")
    write_sums(str(path), ["b", "a"])
    return path


def _keys(path: Path, key: str, namespace: str = "containerd-shim-nvidia-release") -> str:
    with open(f"{key}.pub", encoding="utf-8") as file:
        (path / "keys").write_text(f'# of x\nrelease namespaces="{namespace}" {file.read()}')
    return str(path / "keys")


def test_a_release_is_verified_by_what_every_node_has(release: Path, tmp_path: Path) -> None:
    key = _key(tmp_path, "key")
    keys = _keys(tmp_path, key)
    assert sign(str(release), key, keys) is True
    first = (release / SIGNATURE).read_bytes()
    (release / SIGNATURE).unlink()
    os.unlink(f"{key}.pub")  # the private key contains it
    assert sign(str(release), key, keys) is True
    assert (release / SIGNATURE).read_bytes() == first
    subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=release, check=True)


def test_what_was_changed_is_not_verified(release: Path, tmp_path: Path) -> None:
    key = _key(tmp_path, "key")
    keys = _keys(tmp_path, key)
    sign(str(release), key, keys)
    assert verifies(str(release), keys)
    assert not verifies(str(release), _keys(tmp_path, key, "another"))
    assert not verifies(str(release), _keys(tmp_path, _key(tmp_path, "other")))
    keys = _keys(tmp_path, key)
    (release / SUMS).write_text((release / SUMS).read_text().replace("  a", "  c"))
    assert not verifies(str(release), keys)


def test_a_key_that_users_do_not_know_is_told_apart(release: Path, tmp_path: Path) -> None:
    published = _keys(tmp_path, _key(tmp_path, "published"))
    assert sign(str(release), _key(tmp_path, "another"), published) is False


def test_a_key_that_is_none_is_refused_in_one_line(release: Path, tmp_path: Path) -> None:
    (tmp_path / "none").write_text("no key")
    with raises(SignatureFailed) as raised:
        sign(str(release), str(tmp_path / "none"), "/dev/null")
    assert "\n" not in str(raised.value)
    assert "ssh-keygen -t ed25519" in raised.value.do
    assert not (release / SIGNATURE).exists()


def test_a_key_that_is_none_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tools.release", "--key", f"{tmp_path}/none"]
    done = subprocess.run(
        [*argv, f"{tmp_path}/dist"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("release: NVSHIM-E2606")
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_preview_has_a_version_before_the_release_in_every_package() -> None:
    assert rpm.package_name(INPUTS) == (
        "containerd-shim-nvidia-1.2.0~20231114.221320.abc1234-1.x86_64.rpm"
    )
    released = replace(INPUTS, released=True)
    assert rpm.package_name(released) == "containerd-shim-nvidia-1.2.0-1.x86_64.rpm"
    assert debian.package_name(released) == "containerd-shim-nvidia_1.2.0-1_amd64.deb"
