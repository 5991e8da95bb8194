"""The SBOM of a tree, in the two formats that scanners read.

It lists the Debian packages of the interpreter and its libraries, the packages from PyPI, and our
own files with their digests. Bytecode is not listed: it is compiled from the sources next to it,
and tree.json has a digest of every file. The same tree gives the same SBOM: its time is the
commit's, and its unique name is derived from its contents.

Source: cyclonedx.org, 1.6 (JSON); spdx.github.io, 2.3 (clauses 6 to 11, and 7.9, the package
verification code); package-url.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from integration.tree import PROBE
from tools.dist.archive import PROJECT
from tools.dist.modules import OURS
from tools.dist.project import Project

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.dist.inputs import Inputs

CYCLONEDX: Final = "share/sbom.cdx.json"
SPDX: Final = "share/sbom.spdx.json"

_LICENSE: Final = "Apache-2.0"
_OURS: Final = ("bin", *(f"lib/{name}" for name in OURS), "share/systemd", "share/kubernetes")
_OUR_PROGRAMS: Final = ("runtime/bin/python3", f"runtime/bin/{PROBE}")  # entry.c, probe.c
_UNKNOWN: Final = "NOASSERTION"


@dataclass(frozen=True, slots=True)
class Component:
    """A third-party component of a tree."""

    name: str  # the name of the package
    version: str  # its version
    purl: str  # its source, as a package URL
    licenses: tuple[str, ...] = ()  # as the package names them
    expression: str = ""  # the same as an SPDX expression, if the package has one


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    sha1: str
    sha256: str


def write_lists(tree: str, inputs: Inputs, components: Sequence[Component]) -> None:
    """Write both SBOMs of an otherwise complete tree.

    Args:
        components: everything in it except our own files.
    """
    files = _our_files(tree)
    for name, make in ((CYCLONEDX, cyclonedx), (SPDX, spdx)):
        with open(os.path.join(tree, name), "w", encoding="utf-8") as file:
            json.dump(make(inputs, components, files), file, indent=1)
            file.write("\n")


def cyclonedx(
    inputs: Inputs, components: Sequence[Component], files: Sequence[_File]
) -> dict[str, Any]:
    """Return the SBOM in CycloneDX 1.6."""
    ours = f"pkg:generic/{PROJECT}@{inputs.version}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{_identity(inputs, components, files)}",
        "version": 1,
        "metadata": {
            "timestamp": _timestamp(inputs),
            "component": {
                "type": "application",
                "bom-ref": ours,
                "name": PROJECT,
                "version": inputs.version,
                "purl": ours,
                "licenses": [{"license": {"id": _LICENSE}}],
                "components": [
                    {
                        "type": "file",
                        "name": file.path,
                        "hashes": [{"alg": "SHA-256", "content": file.sha256}],
                    }
                    for file in files
                ],
            },
        },
        "components": [
            {
                "type": "library",
                "bom-ref": each.purl,
                "name": each.name,
                "version": each.version,
                "purl": each.purl,
                "licenses": (
                    [{"expression": each.expression}]
                    if each.expression
                    else [{"license": {"name": name}} for name in each.licenses]
                ),
            }
            for each in components
        ],
        "dependencies": [{"ref": ours, "dependsOn": sorted({each.purl for each in components})}],
    }


def spdx(inputs: Inputs, components: Sequence[Component], files: Sequence[_File]) -> dict[str, Any]:
    """Return the SBOM in SPDX 2.3."""
    ours = f"SPDXRef-{PROJECT}"
    identities = {each: f"SPDXRef-package-{n}" for n, each in enumerate(components)}
    named = {file: f"SPDXRef-file-{n}" for n, file in enumerate(files)}
    code = hashlib.sha1(
        "".join(sorted(file.sha1 for file in files)).encode(), usedforsecurity=False
    )
    package = {
        "SPDXID": ours,
        "name": PROJECT,
        "versionInfo": inputs.version,
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": True,
        "packageVerificationCode": {"packageVerificationCodeValue": code.hexdigest()},
        "licenseConcluded": _LICENSE,
        "licenseDeclared": _LICENSE,
        "licenseInfoFromFiles": [_LICENSE],
        "copyrightText": _UNKNOWN,
        "primaryPackagePurpose": "APPLICATION",
    }
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{PROJECT}-{inputs.version}",
        "documentNamespace": (f"{Project.of().home}/spdx/{_identity(inputs, components, files)}"),
        "creationInfo": {
            "created": _timestamp(inputs),
            "creators": [f"Tool: {PROJECT}-dist-{inputs.version}"],
        },
        "packages": [
            package,
            *(
                {
                    "SPDXID": identities[each],
                    "name": each.name,
                    "versionInfo": each.version,
                    "downloadLocation": _UNKNOWN,
                    "filesAnalyzed": False,
                    "licenseConcluded": _UNKNOWN,
                    "licenseDeclared": each.expression or _UNKNOWN,
                    "licenseComments": "; ".join(each.licenses),
                    "copyrightText": _UNKNOWN,
                    "externalRefs": [
                        {
                            "referenceCategory": "PACKAGE-MANAGER",
                            "referenceType": "purl",
                            "referenceLocator": each.purl,
                        }
                    ],
                }
                for each in components
            ),
        ],
        "files": [
            {
                "SPDXID": named[file],
                "fileName": f"./{file.path}",
                "checksums": [
                    {"algorithm": "SHA1", "checksumValue": file.sha1},
                    {"algorithm": "SHA256", "checksumValue": file.sha256},
                ],
                "licenseConcluded": _LICENSE,
                "licenseInfoInFiles": [_LICENSE],
                "copyrightText": _UNKNOWN,
            }
            for file in files
        ],
        "relationships": [
            _relationship("SPDXRef-DOCUMENT", "DESCRIBES", ours),
            *(_relationship(ours, "CONTAINS", identity) for identity in identities.values()),
            *(_relationship(ours, "CONTAINS", name) for name in named.values()),
        ],
    }


def _relationship(one: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}


def _our_files(tree: str) -> list[_File]:
    paths = [*_OUR_PROGRAMS, "share/LICENSE"]
    for top in _OURS:
        for above, _, names in os.walk(os.path.join(tree, top)):
            inside = os.path.relpath(above, tree)
            paths += [f"{inside}/{name}" for name in names if not name.endswith(".pyc")]
    found = []
    for path in sorted(paths):
        with open(os.path.join(tree, path), "rb") as file:
            content = file.read()
        sha1 = hashlib.sha1(content, usedforsecurity=False)
        found.append(_File(path, sha1.hexdigest(), hashlib.sha256(content).hexdigest()))
    return found


def _timestamp(inputs: Inputs) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(inputs.epoch))


def _identity(inputs: Inputs, components: Sequence[Component], files: Sequence[_File]) -> uuid.UUID:
    listed = repr((inputs.version, inputs.revision, inputs.epoch, [*components], [*files]))
    return uuid.UUID(bytes=hashlib.sha256(listed.encode()).digest()[:16], version=4)


_EXPRESSION: Final = re.compile(r"[\w.+-]+( (AND|OR|WITH) [\w.+-]+)*")


def expression_of(licenses: Sequence[str]) -> str:
    """Return a project's license as an SPDX expression; empty unless it is a single valid one."""
    return licenses[0] if len(licenses) == 1 and _EXPRESSION.fullmatch(licenses[0]) else ""
