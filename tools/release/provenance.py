"""A provenance statement: what a release was made from, and how.

It contains nothing about the machine, and no time, because two builds must be identical.

Source: in-toto.io, Statement v1; slsa.dev, provenance v1 (buildDefinition, runDetails).
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, Final

from tools.dist.modules import REQUIREMENTS
from tools.dist.project import Project
from tools.release.signing import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tools.dist.inputs import Inputs

_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATE: Final = "https://slsa.dev/provenance/v1"


def statement(
    inputs: Inputs, directory: str, names: Iterable[str], packages: Mapping[str, str], commit: str
) -> dict[str, Any]:
    """Return the statement of a release.

    Args:
        packages: the file of each Debian package that it was made from.
        commit: the full name of the commit; empty if unknown.
    """
    project = Project.of(inputs.source)
    of_git = {"digest": {"gitCommit": commit}} if commit else {}
    return {
        "_type": _TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": digest_of(os.path.join(directory, name))}}
            for name in sorted(names)
        ],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{project.home}/build/make-release/v1",
                "externalParameters": {
                    "command": "make release",
                    "version": inputs.version,
                    "revision": inputs.revision,
                    "architecture": inputs.architecture,
                    "released": inputs.released,
                },
                "internalParameters": {"SOURCE_DATE_EPOCH": inputs.epoch},
                "resolvedDependencies": [
                    {"uri": f"git+{project.home}", **of_git},
                    *(
                        {
                            "uri": f"file:{name}",
                            "digest": {"sha256": digest_of(os.path.join(inputs.source, name))},
                        }
                        for name in REQUIREMENTS
                    ),
                    *(
                        {
                            "uri": f"pkg:deb/debian/{_purl(name)}",
                            "digest": {"sha256": digest_of(path)},
                        }
                        for name, path in sorted(packages.items())
                    ),
                ],
            },
            "runDetails": {"builder": {"id": f"{project.home}/builders/make-release"}},
        },
    }


def _purl(file: str) -> str:
    name, version, architecture = re.sub(r"\.deb$", "", file).split("_")
    return f"{name}@{version.replace('%3a', ':')}?arch={architecture}"


def write_statement(path: str, made: dict[str, Any]) -> None:
    """Write a statement."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(made, file, indent=1)
        file.write("\n")
