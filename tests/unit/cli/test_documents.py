"""The output of commands: documents match the reference's schema, tables fit in 80 columns."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import click
import jsonschema
import pytest

from hooks.config import load_config
from integration.cli import app
from integration.cli.kinds import KINDS
from integration.containers.bundles import TASKS
from integration.node.device_health import health_store as store
from integration.simulated import Scenario, SimulatedNode
from tests.harness.launcher import REPOSITORY
from tests.unit.inspection.test_health import keep
from tools.reference.commands import walk
from tools.reference.documents import schema

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA: Final = schema()
PID: Final = 4711
LONG: Final = "a-pod-with-a-long-name-7d9c5b8f4-x2x4z"
RECORDED: Final = f"{REPOSITORY}/tests/recorded/kubernetes-1.36/specs/containerd-2.1.9/nvidia"
OF_PODS: Final = {
    "io.kubernetes.cri.sandbox-name": LONG,
    "io.kubernetes.cri.sandbox-namespace": "a-namespace-of-some-length",
    "io.kubernetes.cri.container-name": "the-server-of-requests",
}


class Place:
    """A node with two GPUs, a pod's container that holds one, and the files that nvshim reads."""

    def __init__(self, node: SimulatedNode, directory: Path) -> None:
        self.node, self._directory = node, directory
        self.bundle = directory / "state" / TASKS / "k8s.io" / ("0f" * 32)
        self.bundle.mkdir(parents=True)
        with open(f"{RECORDED}/gpu-one.main.json", encoding="utf-8") as file:
            spec = json.load(file)["spec"]
        spec["annotations"] = {**spec.get("annotations", {}), **OF_PODS}
        (self.bundle / "config.json").write_text(json.dumps(spec))
        (self.bundle / "init.pid").write_text(str(PID))
        process = directory / "proc" / str(PID)
        process.mkdir(parents=True)
        (process / "stat").write_text(f"{PID} (sleep) S 1 " + "0 " * 40)
        (process / "cgroup").write_text(f"0::/kubepods/pod1/{self.bundle.name}\n")

    def words(self, line: str) -> list[str]:
        """Fill the paths of this node into a command line."""
        places = {
            "CONFIG": f"--config {self.node.config_path}",
            "WHERE": f"--containerd-state {self._directory}/state --procfs {self._directory}/proc",
            "BUNDLE": str(self.bundle),
            "SPECS": f"--spec-dir {self._directory}/cdi",
            "NODE": self.node.directory,
            "LAYOUTS": f"{self._directory}/layouts.yaml",
            "EMPTY": str(self._directory / "empty"),
        }
        words = line.split(" ")
        return [part for word in words for part in places.get(word, word).split(" ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("documents")
    with SimulatedNode.create(str(directory / "node"), Scenario.load("two")) as node:
        os.mkdir(directory / "cdi")
        (directory / "layouts.yaml").write_text(LAYOUTS)
        (directory / "cdi" / "broken.json").write_text("{")
        yield Place(node, directory)


LAYOUTS: Final = """
version: v1
mig-configs:
  a-layout-with-a-long-name-for-each-of-the-two-gpus:
  - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 2, 1c.3g.40gb: 1}}
"""

COMMANDS: Final = (
    "list CONFIG WHERE",
    "info CONFIG --prefix EMPTY",
    "ps CONFIG WHERE",
    "ps CONFIG",
    "ps --gpus CONFIG WHERE",
    "top --once CONFIG WHERE",
    "version",
    "explain default/no CONFIG WHERE",
    f"explain {LONG} CONFIG WHERE",
    "explain 0f0f CONFIG WHERE",
    "explain BUNDLE/config.json CONFIG",
    "explain NVSHIM-E0202",
    "explain D096",
    "explain libcuda.so.1 CONFIG WHERE",
    "explain package:torch CONFIG",
    "doctor CONFIG --only D070 --only D031 --only D022",
    "doctor --list",
    "ledger check CONFIG WHERE",
    "ledger claims CONFIG",
    "ledger release CONFIG",
    "status --prefix EMPTY",
    "config show CONFIG",
    "config get CONFIG policy.mode",
    "config set CONFIG policy.mode strict --dry-run",
    "config unset CONFIG node.dev --dry-run",
    "config validate NODE/config.toml",
    "devices create CONFIG --dry-run",
    "cdi list CONFIG SPECS",
    "cdi validate CONFIG SPECS",
    "drain 1 CONFIG WHERE --reason fan",
    "undrain all CONFIG",
    "mig list CONFIG LAYOUTS",
    "mig diff CONFIG LAYOUTS",
    "mig apply CONFIG WHERE LAYOUTS --dry-run",
    "simulate show NODE",
    "simulate list",
    "simulate scenarios",
)

# Their paths and diffs are not wrapped, so that they can be copied.
WHOLE: Final = (
    "config set", "config unset", "config validate", "cdi validate", "simulate show",
)  # fmt: skip


def check(document: Any) -> None:
    """Check a document against the schema of its kind."""
    jsonschema.Draft202012Validator(
        {**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{document['kind']}"}]}
    ).validate(document)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_document_has_the_keys_that_the_schema_says(
    place: Place, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = line.replace("BUNDLE/", f"{place.bundle}/").replace("NODE/", f"{place.node.directory}/")
    status = app.main([*place.words(line), "-o", "json"])
    seen = capsys.readouterr()
    document = json.loads(seen.err if status == 1 else seen.out)
    check(document)
    named = [KINDS[words] for words in KINDS if line.startswith(words)]
    special = {
        "HoldingList", "CodeMeaning", "CheckList", "DriverFile", "DriverPackage", "Error",
    }  # fmt: skip
    assert document["kind"] in {*named, *special}
    assert (document["kind"] == "Error") == line.startswith("explain default/no")


@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith(WHOLE)])
def test_a_table_fits_80_columns_where_there_is_no_terminal(
    place: Place, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    app.main(place.words(line.replace("BUNDLE/", f"{place.bundle}/")))
    lines = capsys.readouterr().out.splitlines()
    # Problems are sentences about the engines of this machine.
    lines = [each for each in lines if " names a shim that does " not in each]
    assert all(len(each) <= 80 for each in lines), lines


def test_health_has_the_keys_too(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(load_config(place.node.config_path))
    monkeypatch.setattr("integration.node.device_health.report.is_ready", lambda _: True)
    try:
        for line in ("list --health CONFIG", "health list CONFIG"):
            app.main([*place.words(line), "-o", "json"])
            document = json.loads(capsys.readouterr().out)
            check(document)
            assert document["kind"] == "HealthList"
    finally:
        os.unlink(store.path_of(load_config(place.node.config_path)))


def test_a_key_that_is_not_in_the_schema_is_noticed() -> None:
    document = {"apiVersion": "nvshim/v1", "kind": "ScenarioList", "items": []}
    check(document)
    for wrong in (
        {**document, "more": 1}, {**document, "items": [{"name": "x"}]},
        {**document, "apiVersion": "nvshim/v2"},
    ):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


def test_every_command_that_answers_with_a_document_has_a_kind() -> None:
    def writes_documents(command: click.Command) -> bool:
        forms = [p.type.choices for p in command.params if isinstance(p.type, click.Choice)
                 and p.name == "form"]  # fmt: skip
        return any("table" in choices for choices in forms)

    found = {name.partition(" ")[2] for name, each in walk() if writes_documents(each)}
    assert found <= set(KINDS)
    assert set(KINDS) - found == {"ledger list", "health list"}  # old names, which are not listed
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
