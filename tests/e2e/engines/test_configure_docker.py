"""``nvshim configure docker`` on many nodes' daemon.json, checked with the real dockerd."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from integration.engines import apply, plan, plan_removal
from integration.engines.docker import HOOK, Options
from integration.engines.errors import (
    ChangedByHand,
    ConfigInvalid,
    ConfigRefused,
    EditImpossible,
    EngineTooOld,
    HandlerInUse,
    HandlerTaken,
    RecordInvalid,
)
from tests.harness.docker import DockerParts
from tests.harness.raising import raises

GRUBBY: Final = """{
\t"live-restore" : true,

\t"runtimes": { "kata": { "path": "/usr/bin/kata-runtime", "runtimeArgs": [] } },
\t"default-runtime": "kata"
}"""


@pytest.fixture(scope="module")
def dockerd() -> str:
    return DockerParts.of_release("trixie").dockerd


class Node:
    """A node's /etc/docker, and the places of the hook and of our record."""

    def __init__(self, directory: str, dockerd: str) -> None:
        self.directory = directory
        self.dockerd = dockerd
        self.config = f"{directory}/etc/daemon.json"

    def options(self, **more: Any) -> Options:
        more = {"program": self.dockerd, **more}
        return Options(
            config=self.config, hook_directory=f"{self.directory}/bin",
            records=f"{self.directory}/records", **more,
        )  # fmt: skip

    def write(self, text: str) -> None:
        os.makedirs(f"{self.directory}/etc", exist_ok=True)
        with open(self.config, "w", newline="") as file:
            file.write(text)

    def read(self) -> str:
        with open(self.config, newline="") as file:
            return file.read()

    def tree(self) -> list[str]:
        return sorted(
            os.path.relpath(f"{top}/{name}", self.directory)
            for top, directories, names in os.walk(self.directory)
            for name in (*directories, *names)
        )


@pytest.fixture
def node(tmp_path: Path, dockerd: str) -> Node:
    return Node(str(tmp_path), dockerd)


@pytest.mark.parametrize(
    "text", [None, "", "{}", "\ufeff{}", '{"features": {"cdi": false}}\n', GRUBBY]
)
def test_members_are_added_as_their_neighbours_are_and_come_out_again(
    node: Node, text: str | None
) -> None:
    if text is not None:
        node.write(text)
    tree = node.tree()
    options = node.options(set_default=True, enable_cdi=True)
    apply(plan(options))
    before, after = (
        json.loads(each.removeprefix("\ufeff") or "{}") for each in (text or "", node.read())
    )
    assert after.pop("default-runtime") == "nvidia"
    assert after["runtimes"].pop("nvidia") == {"runtimeType": "io.containerd.nvidia.v1"}
    assert after["features"].pop("cdi") is True
    assert after["runtimes"] == before.get("runtimes", {})
    assert after.get("live-restore") == before.get("live-restore")
    if text == GRUBBY:
        assert node.read().startswith('{\n\t"live-restore" : true,\n\n\t"runtimes": { "kata": {')
    assert plan(options).files == ()
    apply(plan_removal(options))
    assert node.tree() == tree
    assert text is None or node.read() == text


def test_shim_of_an_earlier_call_stays(node: Node) -> None:
    apply(plan(node.options(shim="/opt/containerd-shim-nvidia-v1")))
    assert plan(node.options()).files == ()
    apply(plan(node.options(runtime_name="gpu")))
    runtimes = json.loads(node.read())["runtimes"]
    assert runtimes == {"gpu": {"runtimeType": "/opt/containerd-shim-nvidia-v1"}}
    apply(plan_removal(node.options()))
    assert node.tree() == []


NVIDIAS: Final = """{
    "data-root": "/srv/docker",
    "default-runtime": "nvidia",
    "runtimes": {
        "nvidia": {
            "args": [],
            "path": "nvidia-container-runtime"
        }
    }
}
"""


def test_place_of_nvidias_runtime_is_taken_and_given_back_to_the_byte(node: Node) -> None:
    node.write(NVIDIAS)
    tree = node.tree()
    with raises(HandlerTaken, match=r'"path": "nvidia-container-runtime".* Add --replace'):
        plan(node.options())
    apply(plan(node.options(replace=True)))
    after = json.loads(node.read())
    assert after["runtimes"] == {"nvidia": {"runtimeType": "io.containerd.nvidia.v1"}}
    assert after["default-runtime"] == "nvidia"
    assert plan(node.options()).files == ()
    apply(plan(node.options(set_default=True, enable_cdi=True)))
    configured = node.read()
    apply(plan_removal(node.options()))
    assert (node.read(), node.tree()) == (NVIDIAS, tree)
    # After a kill between record and file, both install and removal complete.
    change = plan(node.options(replace=True, enable_cdi=True, set_default=True))
    apply(type(change)("docker", change.files[:1], change.need, "", change.lock))
    assert node.read() == NVIDIAS
    apply(plan(node.options(replace=True, enable_cdi=True, set_default=True)))
    assert node.read() == configured
    # Later edits by others stay.
    node.write(node.read().replace("/srv/docker", "/srv/mine"))
    apply(plan_removal(node.options()))
    assert json.loads(node.read()) == json.loads(NVIDIAS.replace("/srv/docker", "/srv/mine"))


def test_what_others_changed_since_stays_and_what_they_replaced_does_too(node: Node) -> None:
    node.write(GRUBBY)
    apply(plan(node.options(set_default=True)))
    node.write(node.read().replace("true", "false").replace('"nvidia"', '"mine"', 1))
    theirs = json.loads(node.read())
    apply(plan_removal(node.options()))
    after = json.loads(node.read())
    assert after["live-restore"] is False
    assert after["runtimes"] == {
        name: value for name, value in theirs["runtimes"].items() if name != "nvidia"
    }
    assert after["default-runtime"] == "kata"


def test_runtime_that_somebody_made_the_default_is_not_taken_away(node: Node) -> None:
    node.write(GRUBBY)
    apply(plan(node.options()))
    node.write(node.read().replace('"default-runtime": "kata"', '"default-runtime": "nvidia"'))
    for act, name in ((plan_removal, "nvidia"), (plan, "gpu")):
        with raises(HandlerInUse, match="dockerd would not start"):
            act(node.options(runtime_name=name))
    apply(plan_removal(node.options(force=True)))
    assert json.loads(node.read())["default-runtime"] == "nvidia"


def test_hook_of_others_is_left_alone_and_ours_is_not_overwritten_blindly(node: Node) -> None:
    os.makedirs(f"{node.directory}/bin")
    hook = f"{node.directory}/bin/{HOOK}"
    with open(hook, "w") as file:
        file.write("#!/bin/sh\n")
    os.chmod(hook, 0o755)
    change = plan(node.options())
    assert hook not in [file.path for file in change.files]
    assert change.need == "reload"
    os.unlink(hook)
    apply(plan(node.options()))
    assert os.access(hook, os.X_OK)
    with open(hook, "a") as file:
        file.write("# mine\n")
    with raises(ChangedByHand):
        plan_removal(node.options())
    apply(plan_removal(node.options(force=True)))
    assert not os.path.exists(hook)


def picky(node: Node) -> str:
    """Return a dockerd that accepts every file except one with our runtime."""
    path = f"{node.directory}/dockerd"
    with open(path, "w") as file:
        file.write(f"""#!/bin/sh
case "$1" in --version) exec {node.dockerd} --version ;; esac
if grep -q nvidia "$3"; then echo "no-such-shim in $3" >&2; exit 1; fi
""")
    os.chmod(path, 0o755)
    return path


def test_what_stands_in_the_way_is_one_line(node: Node) -> None:
    for text, kind, pattern in (
        ("{", ConfigInvalid, "not valid JSON"),
        ("[]", ConfigInvalid, "not an object"),
        (f'{{"a": {"[" * 100_000}', ConfigInvalid, "not valid JSON: "),
        ('{"runtimes": []}', EditImpossible, "runtimes is not an object"),
        ('{"runtimes": {"nvidia": {"path": "/x"}}}', HandlerTaken, "--replace"),
    ):
        node.write(text)
        with raises(kind, match=pattern):
            plan(node.options())
        assert node.read() == text
    node.write("{}")
    with pytest.raises(ConfigRefused, match="no-such-shim"):
        plan(node.options(program=picky(node)))
    node.write('{"no-such-option": 1}')
    assert "no-such-option" in plan(node.options()).notes[0], "dockerd refuses it even unchanged"
    node.write("{}")
    os.makedirs(f"{node.directory}/records")
    with open(node.options().record, "w") as file:
        file.write('{"config": 1}')
    with raises(RecordInvalid, match="by hand"):
        plan(node.options())
    old = DockerParts.of_release("bookworm").dockerd
    with raises(EngineTooOld, match=r"Docker 20\.10"):
        plan(node.options(program=old))
