"""Facts and findings in one file, for a request of support.

============================  =================================================
file                          what it is
============================  =================================================
nvshim-doctor/README          what this is, and what is not in it
nvshim-doctor/facts.json      what was seen: :class:`~integration.doctor.facts.Node`
nvshim-doctor/findings.json   what was found: the answer of ``nvshim doctor -o json``
============================  =================================================

There is no value of an environment variable in it, no argument of a process and no file of the
node as it stands: only the facts that :mod:`integration.doctor.facts` names. Names of containers,
namespaces, files and GPUs are in it.
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
from typing import TYPE_CHECKING, Any, Final

from integration.doctor.errors import BundleNotWritten
from integration.doctor.identity import identity_of

if TYPE_CHECKING:
    from integration.doctor.examination import Examination

_DIRECTORY: Final = "nvshim-doctor"
_README: Final = """\
What `nvshim doctor` saw on a node, and what it made of it.

facts.json     what was seen
findings.json  what was found

No value of an environment variable is in it, no argument of a process, and no file of the node
as it stands. Names of containers, namespaces, files and GPUs are.
"""


def report(examination: Examination) -> dict[str, Any]:
    """The answer of ``nvshim doctor -o json``.

    Returns:
        Values that JSON has; the keys are an interface.
    """
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
    """Write the bundle, whole or not at all, for nobody but its owner to read.

    Args:
        path: of the .tar.gz; a file that is there is replaced.
        examination: what goes into it.

    Raises:
        BundleNotWritten: it cannot be written there.
    """
    files: Mapping[str, str] = {
        "README": _README,
        "facts.json": _json(dataclasses.asdict(examination.node)),
        "findings.json": _json(report(examination)),
    }
    directory = os.path.dirname(os.path.abspath(path))
    aside = ""
    try:
        if os.path.lexists(path) and not os.path.isfile(path):
            raise BundleNotWritten(
                f"to write {path}", found="there is something else than a file", do="name a file"
            )
        fd, aside = tempfile.mkstemp(dir=directory, prefix=".nvshim-")
        with open(fd, "wb") as stream:
            _write(stream, files)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(aside, path)
        aside = ""
    except OSError as error:
        raise BundleNotWritten(
            f"to write {path}",
            found=error.strerror or str(error),
            do="name a file in a directory that can be written",
        ) from error
    finally:
        if aside:
            with contextlib.suppress(OSError):
                os.unlink(aside)


def _write(stream: Any, files: Mapping[str, str]) -> None:
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, text in files.items():
            content = text.encode(errors="replace")  # a path may be no text
            member = tarfile.TarInfo(f"{_DIRECTORY}/{name}")
            member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(content))


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
