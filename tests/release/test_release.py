"""A release is the same whoever makes it, and what is said of it holds for those who check it."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Final

import pytest

from shim import VERSION
from tests.harness.launcher import REPOSITORY
from tests.harness.pages import blocks, read_page

if TYPE_CHECKING:
    from pathlib import Path

    from tests.release.conftest import Release

VALIDATORS: Final = os.environ.get("NVSHIM_TEST_RELEASE", "")

_CYCLONEDX: Final = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()) or "valid")
"""
_SPDX: Final = """
import sys
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
found = validate_full_spdx_document(parse_file(sys.argv[1]))
print(*(each.validation_message for each in found) if found else ["valid"], sep="\\n")
"""


def test_two_builds_are_the_same_byte_for_byte(releases: tuple[Release, Release]) -> None:
    one, other = (release.path for release in releases)
    names = sorted(os.listdir(one))
    assert sorted(os.listdir(other)) == names
    same, changed, unread = filecmp.cmpfiles(one, other, names, shallow=False)
    assert (sorted(same), changed, unread) == (names, [], [])
    modes = {stat.S_IMODE(os.stat(os.path.join(other, name)).st_mode) for name in names}
    assert modes == {0o644}


def test_it_has_everything_that_the_page_says(release: Release) -> None:
    page = read_page("docs/releases.md")
    patterns = re.findall(r"^\| `(containerd-[^`]+)` \|", page, re.MULTILINE)
    patterns += re.findall(r"`…(\.[a-z.]+\.?json)`", page)
    for pattern in ["SHA256SUMS", "SHA256SUMS.sig", *patterns]:
        words = re.split("VERSION|ARCH", pattern)
        expression = ".*".join(map(re.escape, words))
        assert [x for x in os.listdir(release.path) if re.fullmatch(f"(.*){expression}", x)], (
            pattern
        )
    assert len(os.listdir(release.path)) == 10


def test_users_verify_it_by_the_commands_of_the_page(release: Release, tmp_path: Path) -> None:
    work = tmp_path / "download"
    shutil.copytree(release.path, work)
    with open(f"{release.key}.pub", encoding="utf-8") as file:
        (work / "RELEASE_KEYS").write_text(
            f'release namespaces="containerd-shim-nvidia-release" {file.read()}'
        )
    (block,) = (b for b in blocks("docs/releases.md") if "ssh-keygen" in b.commands[0].text)
    script = "set -e\n" + "\n".join(command.text for command in block.commands)

    def verify() -> int:
        done = subprocess.run(["bash", "-c", script], cwd=work, capture_output=True, check=False)
        return done.returncode

    assert verify() == 0
    with open(next(work.glob("*.tgz")), "ab") as archive:
        archive.write(b"x")
    assert verify() == 1


@pytest.mark.parametrize(("ending", "code"), [(".cdx.json", _CYCLONEDX), (".spdx.json", _SPDX)])
def test_the_lists_are_valid_by_others_judgement(release: Release, ending: str, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, release.one(ending)],
        env={**os.environ, "PYTHONPATH": VALIDATORS},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("valid\n", 0), done.stderr


def test_the_lists_have_every_package_that_is_pinned(release: Release) -> None:
    with open(os.path.join(REPOSITORY, "requirements/node.txt"), encoding="utf-8") as file:
        pinned = re.findall(r"^([\w.-]+)==(\S+)", file.read(), re.MULTILINE)
    with open(release.one(".cdx.json"), encoding="utf-8") as file:
        listed = {(x["name"], x["version"]) for x in json.load(file)["components"]}
    assert {(name.lower().replace("_", "-"), version) for name, version in pinned} <= listed
    assert {"libc6", "libpython3.13-stdlib", "python3.13-minimal"} <= {name for name, _ in listed}


def test_the_provenance_has_the_digest_of_every_file(release: Release) -> None:
    with open(os.path.join(release.path, "SHA256SUMS"), encoding="ascii") as file:
        sums = {name: digest for digest, name in map(str.split, file)}
    with open(release.one(".intoto.json"), encoding="utf-8") as file:
        made = json.load(file)
    subjects = {x["name"]: x["digest"]["sha256"] for x in made["subject"]}
    of_itself = sums.keys() - subjects.keys()
    assert [name for name in of_itself if not name.endswith(".intoto.json")] == []
    assert subjects == {name: sums[name] for name in subjects}
    dependencies = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert any(x["uri"].startswith("pkg:deb/debian/libc6@") for x in dependencies)


def test_the_image_is_an_oci_archive_of_this_version(release: Release) -> None:
    with tarfile.open(release.one(".image.tar")) as archive:
        index = archive.extractfile("index.json")
        assert index is not None
        (manifest,) = json.load(index)["manifests"]
    assert manifest["annotations"]["org.opencontainers.image.ref.name"] == VERSION
