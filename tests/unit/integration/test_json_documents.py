"""JSON from other programs: a document that is nested too deeply raises the expected error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from integration.json_documents import DEEPEST, NestedTooDeeply, parse_json
from tests.harness.launcher import REPOSITORY

# Modules that read only JSON from this program, its children or its package, so that no other
# writer decides how deep it is.
OWN: Final = {
    "hooks/node/nvml_probe.py",
    "integration/doctor/findings.py",
    "integration/doctor/observing/nvml.py",
    "integration/engines/crio.py",
    "integration/doctor/codes.py",
    "integration/inspection/driver_packages.py",
    "integration/json_documents.py",
    "integration/kubernetes/engine_query.py",
    "integration/nvml/child_samples.py",
    "integration/nvml/session.py",
    "integration/nvml/child_events.py",
    "integration/driver_launch_child.py",
    "integration/node/services/mps/compute_modes.py",
    "integration/nvml/topology.py",
    "integration/nvml/fork_server.py",
    "integration/simulated/node.py",
    "shim/stdio/files.py",
    "shim/verbs/handover.py",
    "shim/work/worker.py",
}
READS: Final = re.compile(r"\bjson\.loads?\(|\byaml\.(?:safe_)?load|\btomllib\.loads?\(")


def nested(depth: int, kind: str) -> str:
    begin, end = {"lists": ("[", "]"), "objects": ('{"a":', "}")}[kind]
    return begin * depth + ("" if kind == "lists" else "1") + end * depth


@pytest.mark.parametrize("kind", ["lists", "objects"])
def test_a_document_is_as_deep_as_one_may_be(kind: str) -> None:
    assert parse_json(nested(DEEPEST, kind)) is not None
    for depth in (DEEPEST + 1, 900, 1100, 100_000):
        with pytest.raises(NestedTooDeeply, match="nested too deeply"):
            parse_json(nested(depth, kind).encode())


@pytest.mark.parametrize("text", ["1", '"a"', "null", "[]", '{"a": [{}, {"b": null}]}'])
def test_what_is_not_deep_is_as_it_was(text: str) -> None:
    assert parse_json(text) == parse_json(text.encode())


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 5])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, whose words these are
        parse_json(text)


def test_whoever_reads_what_others_write_expects_it_to_be_nested_too_deeply() -> None:
    careless = []
    for package in ("api", "hooks", "shim", "integration"):
        for path in Path(REPOSITORY, package).rglob("*.py"):
            name, text = str(path.relative_to(REPOSITORY)), path.read_text("utf-8")
            if READS.search(text) and "RecursionError" not in text and name not in OWN:
                careless.append(name)
    assert careless == []
    assert [name for name in OWN if not READS.search(Path(REPOSITORY, name).read_text())] == []
