"""The SBOMs of a tree are complete, and the same in both formats."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from tools.dist.inputs import Inputs
from tools.dist.sbom import CYCLONEDX, SPDX, Component, expression_of, write_lists

if TYPE_CHECKING:
    from pathlib import Path

INPUTS: Final = Inputs(
    source="/nowhere", version="1.2.0", revision="abc1234", epoch=1_700_000_000,
    architecture="amd64",
)  # fmt: skip
COMPONENTS: Final = (
    Component("libc6", "2.41-1", "pkg:deb/debian/libc6@2.41-1", ("LGPL-2.1", "GPL-2")),
    Component("anyio", "4.9", "pkg:pypi/anyio@4.9", ("MIT",), "MIT"),
)
FILES: Final = (
    "bin/nvshim", "lib/shim/__init__.py", "lib/shim/__pycache__/__init__.cpython-313.pyc",
    "lib/anyio/__init__.py", "runtime/bin/python3", "runtime/bin/nvshim-probe",
    "runtime/bin/python", "share/LICENSE",
)  # fmt: skip
OURS: Final = {
    "bin/nvshim", "lib/shim/__init__.py", "runtime/bin/nvshim-probe", "runtime/bin/python3",
    "share/LICENSE",
}  # fmt: skip


@pytest.fixture
def lists(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write_lists(str(tmp_path), INPUTS, COMPONENTS)
    first = [(tmp_path / name).read_text() for name in (CYCLONEDX, SPDX)]
    write_lists(str(tmp_path), INPUTS, COMPONENTS)
    assert [(tmp_path / name).read_text() for name in (CYCLONEDX, SPDX)] == first
    return json.loads(first[0]), json.loads(first[1])


def _sha256(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def test_cyclonedx_has_what_is_others_and_our_files(
    lists: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    found, _ = lists
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert [(x["name"], x["version"], x["purl"]) for x in found["components"]] == [
        (x.name, x.version, x.purl) for x in COMPONENTS
    ]
    assert found["components"][1]["licenses"] == [{"expression": "MIT"}]
    assert found["components"][0]["licenses"][1] == {"license": {"name": "GPL-2"}}
    (dependency,) = found["dependencies"]
    assert dependency["dependsOn"] == sorted(x.purl for x in COMPONENTS)
    ours = found["metadata"]["component"]
    assert dependency["ref"] == ours["bom-ref"]
    assert {x["name"]: x["hashes"][0]["content"] for x in ours["components"]} == {
        name: _sha256(name) for name in OURS
    }
    assert found["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"


def test_spdx_has_the_same_and_every_relationship_leads_somewhere(
    lists: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    _, found = lists
    assert found["spdxVersion"] == "SPDX-2.3"
    ours, *others = found["packages"]
    purls = {x["externalRefs"][0]["referenceLocator"]: x["licenseDeclared"] for x in others}
    assert purls == {x.purl: x.expression or "NOASSERTION" for x in COMPONENTS}
    assert {x["fileName"]: x["checksums"][1]["checksumValue"] for x in found["files"]} == {
        f"./{name}": _sha256(name) for name in OURS
    }
    sums = sorted(x["checksums"][0]["checksumValue"] for x in found["files"])
    code = ours["packageVerificationCode"]["packageVerificationCodeValue"]
    assert code == hashlib.sha1("".join(sums).encode()).hexdigest()
    identities = {x["SPDXID"] for x in (*found["packages"], *found["files"])}
    described = [x for x in found["relationships"] if x["relationshipType"] == "DESCRIBES"]
    assert [x["relatedSpdxElement"] for x in described] == [ours["SPDXID"]]
    contained = {x["relatedSpdxElement"] for x in found["relationships"] if x not in described}
    assert contained == identities - {ours["SPDXID"]}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (["MIT"], "MIT"),
        (["Apache-2.0 OR BSD-3-Clause"], "Apache-2.0 OR BSD-3-Clause"),
        (["BSD License"], ""),
        (["A", "B"], ""),
        ([], ""),
    ],
)
def test_only_what_looks_like_an_expression_is_one(said: list[str], expected: str) -> None:
    assert expression_of(said) == expected
