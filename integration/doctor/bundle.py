"""Write facts and findings to one file, for a support request.

============================  =================================================
file                          content
============================  =================================================
nvshim-doctor/README          what the bundle contains, and what it does not
nvshim-doctor/facts.json      the facts: :class:`~integration.doctor.facts.Node`
nvshim-doctor/findings.json   the findings: the output of ``nvshim doctor -o json``
============================  =================================================

The bundle contains only the facts of :mod:`integration.doctor.facts`: no values of environment
variables, no process arguments, no copies of the node's files. It does contain names of
containers, namespaces, files and GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Final

from integration.doctor.errors import BundleNotWritten
from integration.doctor.examination import Examination
from integration.doctor.identity import identity_of

_DIRECTORY: Final = "nvshim-doctor"
_README: Final = """\
A diagnosis of a node by `nvshim doctor`.

facts.json     the facts about the node
findings.json  the problems that were found

It contains no values of environment variables, no process arguments and no copies of the node's
files. It contains names of containers, namespaces, files and GPUs.
"""


def report(examination: Examination) -> dict[str, Any]:
    """Return the document of ``nvshim doctor -o json``; its keys are an interface."""
    counts: dict[str, int] = {}
    for finding in examination.findings:
        counts[finding.severity.value] = counts.get(finding.severity.value, 0) + 1
    return {
        "node": identity_of(examination.node),
        "healthy": examination.is_healthy,
        "counts": {key: counts.get(key, 0) for key in ("error", "warning", "note")},
        "checked": [check.code for check in examination.checks],
        "skipped": list(examination.skipped),
        "findings": [
            {**dataclasses.asdict(finding), "severity": finding.severity.value}
            for finding in examination.findings
        ],
    }


def write_bundle(path: str, examination: Examination) -> None:
    """Write the bundle atomically, readable by its owner only.

    Args:
        path: the .tar.gz; an existing file is replaced.
        examination: the facts and findings.

    Raises:
        BundleNotWritten: the file cannot be written.
    """
    files: Mapping[str, str] = {
        "README": _README,
        "facts.json": _json(dataclasses.asdict(examination.node)),
        "findings.json": _json(report(examination)),
    }
    directory = os.path.dirname(os.path.abspath(path))
    temporary = ""
    try:
        if os.path.lexists(path) and not os.path.isfile(path):
            raise BundleNotWritten(
                f"to write {path}", found="it exists and is not a file", do="name another file"
            )
        fd, temporary = tempfile.mkstemp(dir=directory, prefix=".nvshim-")
        with open(fd, "wb") as stream:
            _write(stream, files)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, path)
        temporary = ""
    except OSError as error:
        raise BundleNotWritten(
            f"to write {path}",
            found=error.strerror or str(error),
            do="name a file in a writable directory",
        ) from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _write(stream: Any, files: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, text in files.items():
            content = text.encode(errors="replace")  # a path may not be valid UTF-8
            member = tarfile.TarInfo(f"{_DIRECTORY}/{name}")
            member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(content))


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
