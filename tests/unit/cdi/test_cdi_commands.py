"""``nvshim cdi``, on a node made of files."""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from hooks.cdi import schema
from hooks.cdi.files import tree_of
from integration import exits
from integration.cdi import writing
from integration.cdi.errors import CdiSpecUnwritten
from tests.harness.raising import raises
from tests.unit.cdi.conftest import Nvshim
from tests.unit.hooks.fake_node import NVIDIA, VERSION, Node, uuid_of

pytestmark = pytest.mark.usefixtures("config_file")


def device(name: str, **edits: Any) -> dict[str, Any]:
    return {"name": name, "containerEdits": edits or {"env": ["A=b"]}}


def spec(
    directory: Path,
    name: str,
    *devices: dict[str, Any],
    kind: str = "vendor.example/x",
    **more: Any,
) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": devices, **more}))
    return path


# generate


def test_spec_is_as_the_reader_wants_it_in_both_forms(tmp_path: Path, nvshim: Nvshim) -> None:
    specs = {}
    for name in ("a/nvidia.yaml", "b/nvidia.json"):
        path = tmp_path / name
        seen = nvshim("cdi", "generate", "--to", str(path))
        assert seen.err.endswith("5 devices of nvidia.com/gpu, CDI 0.5.0\n")
        assert path.stat().st_mode & 0o777 == 0o644
        assert os.listdir(path.parent) == [path.name]
        specs[name] = schema.parse(tree_of(path.read_bytes(), name), name)
        nvshim("cdi", "validate", str(path))
    assert len(set(specs.values())) == 1
    made = nvshim("cdi", "generate", "-o", "json", "--vendor", "x.y", "--no-all-device").json
    assert made["kind"] == "x.y/gpu"
    assert [each["name"] for each in made["devices"]] == ["0", uuid_of(0), "1", uuid_of(1)]
    seen = nvshim("cdi", "generate", "--device", "1,0", "--device-name-strategy", "index")
    shown = yaml.safe_load(seen.out)
    assert [each["name"] for each in shown["devices"]] == ["1", "0", "all"]


@pytest.mark.parametrize(
    ("version", "reads"),
    [("3.4.4", False), ("4.9.3", False), ("5.0.3-rhel", False), ("5.1.0", True), ("5.10", True)],
)
def test_podman_that_refuses_groups_gets_a_spec_without_them(
    version: str, *, reads: bool, node: Node, tmp_path: Path, nvshim: Nvshim,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("integration.engines.programs.PATH", str(tmp_path))
    monkeypatch.setattr("integration.engines.podman._PODMAN", "podman")
    node.add_gpu(2, "0000:00:01.0", drm=True)
    command, ctk = ("cdi", "generate", "-o", "json"), ("compat", "nvidia-ctk", "cdi", "generate")

    def groups(*words: str) -> tuple[set[int], bool]:
        """Return the groups in the spec, and whether Podman was the reason."""
        seen = nvshim(*words)
        found = yaml.safe_load(seen.out)
        edits = [each["containerEdits"] for each in found["devices"]]
        listed = {gid for each in edits for gid in each.get("additionalGids", [])}
        assert (found["cdiVersion"] == "0.7.0") == bool(listed)
        return listed, "Podman" in seen.err

    everything: tuple[set[int], bool] = ({44}, False)
    nothing: tuple[set[int], bool] = (set(), False)
    assert groups(*command) == everything
    program = tmp_path / "podman"
    program.write_text(f"#!/bin/sh\necho podman version {version}\n")
    program.chmod(0o755)
    for words in (command, ctk):
        assert groups(*words) == (everything if reads else (set(), True))
    assert groups(*command, "--groups") == everything
    assert groups(*command, "--no-groups") == nothing
    # An engine that does not run reads no specs.
    for text in ("#!/bin/sh\nexit 1\n", "no program"):
        program.write_text(text)
        assert groups(*command) == everything


def test_a_device_or_a_pipe_is_written_to_and_stays(tmp_path: Path, nvshim: Nvshim) -> None:
    text = nvshim("cdi", "generate").out
    reading, writing_end = os.pipe()
    fcntl.fcntl(writing_end, fcntl.F_SETPIPE_SZ, 1 << 20)
    nvshim("cdi", "generate", "--to", f"/dev/fd/{writing_end}")
    os.close(writing_end)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read().decode() == text
    full = tmp_path / "full"
    os.mknod(full, stat.S_IFCHR | 0o600, os.makedev(1, 7))
    assert "NVSHIM-E2530" in (told := nvshim("cdi", "generate", "--to", str(full), ends=1).err)
    assert "No space left" in told
    assert full.is_char_device()


def test_roots_are_those_of_the_options(node: Node, tmp_path: Path, nvshim: Nvshim) -> None:
    container = tmp_path / "container"
    container.mkdir()
    (node.driver).rename(container / "driver")
    (node.dev).rename(container / "dev")
    assert "NVSHIM-E0102" in nvshim("cdi", "generate", ends=1).err
    roots = ["--driver-root", f"{container}/driver", "--dev-root", str(container)]
    made = nvshim("cdi", "generate", *roots, "-o", "json").json
    sources = {mount["hostPath"] for mount in made["containerEdits"]["mounts"]}
    assert all(source.startswith(f"{container}/driver/") for source in sources)


def test_a_failure_is_a_document_if_the_spec_was_to_be_one(nvshim: Nvshim) -> None:
    seen = nvshim("cdi", "generate", "-o", "json", "--kind", "gds", ends=1)
    assert json.loads(seen.err)["error"]["code"] == "NVSHIM-E0611"


def test_file_keeps_its_owner_and_mode_and_a_link_stays_one(tmp_path: Path) -> None:
    file, link = tmp_path / "real.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    os.chown(file, 0, 44)
    link.symlink_to("real.json")
    writing.write(str(link), "new")
    assert link.is_symlink()
    seen = file.stat()
    assert (file.read_text(), seen.st_mode & 0o777, seen.st_gid) == ("new", 0o640, 44)


def test_file_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dir.json").mkdir()
    before = sorted(os.listdir(tmp_path))
    for name in ("file/x.json", "dir.json"):
        with raises(CdiSpecUnwritten, match="cannot write"):
            writing.write(f"{tmp_path}/{name}", "{}")
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--kind", "x"],
        ["generate", "--annotation", "x"],
        ["generate", "--library-directory", "x"],
        ["generate", "--output=/etc/cdi/nvidia.yaml"],
        ["validate", "--spec-dir", "/x", "y"],
        ["transform", "root", "--from", "x"],
        ["transform", "root"],
        [],
    ],
)
def test_arguments_that_mean_nothing(words: list[str], nvshim: Nvshim) -> None:
    assert nvshim("cdi", *words, ends=exits.USAGE).out == ""


# list


def test_list_says_which_file_counts(tmp_path: Path, nvshim: Nvshim) -> None:
    low, high = tmp_path / "etc-cdi", tmp_path / "run-cdi"
    spec(low, "a.json", device("0"), device("1"))
    spec(low, "b.json", device("1"))
    spec(high, "c.json", device("0"))
    spec(high, "broken.json", kind="not a kind")
    shown = nvshim("cdi", "list", "-o", "json").json
    assert [(row["name"], row["state"], row["file"]) for row in shown["items"]] == [
        ("vendor.example/x=0", "used", f"{high}/c.json"),
        ("vendor.example/x=0", "hidden", f"{low}/a.json"),
        ("vendor.example/x=1", "conflict", f"{low}/a.json"),
        ("vendor.example/x=1", "conflict", f"{low}/b.json"),
    ]
    assert [fault["code"] for fault in shown["faults"]] == ["NVSHIM-E0602"]
    seen = nvshim("cdi", "list", "-o", "wide", "--spec-dir", str(high))
    assert [line.split() for line in seen.out.splitlines()] == [
        ["DEVICE", "STATE", "FILE"],
        ["vendor.example/x=0", "used", f"{high}/c.json"],
    ]
    assert seen.err.startswith("NVSHIM-E0602")


# validate


def test_validate_finds_what_the_host_has_no_more(
    node: Node, tmp_path: Path, nvshim: Nvshim
) -> None:
    directory = tmp_path / "run-cdi"
    nvshim("cdi", "generate", "--to", f"{directory}/nvidia.yaml")
    assert f"{directory}/nvidia.yaml: valid, 5 devices" in nvshim("cdi", "validate").out
    library = node.driver / f"usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}"
    library.rename(library.with_name("libcuda.so.999.1"))
    (node.dev / "nvidia0").unlink()
    (node.dev / "nvidia1").unlink()
    node.add_node("nvidia1", NVIDIA, 7)
    (file,) = nvshim("cdi", "validate", "-o", "json", ends=exits.FOUND).json["items"]
    assert not file["valid"]
    assert {(each["what"], each["subject"]) for each in file["findings"]} == {
        ("missing", str(library)),
        ("missing", "/dev/nvidia0"),
        ("changed", "/dev/nvidia1"),
    }
    lines = nvshim("cdi", "validate", f"{directory}/nvidia.yaml", ends=exits.FOUND).out.splitlines()
    assert lines[0].endswith("3 findings")
    assert (
        "  error: changed: /dev/nvidia1: it is device 195:7, not 195:1 (device nvidia.com/gpu=1)"
        in (lines)
    )


def test_validate_tells_of_files_that_nobody_can_use(tmp_path: Path, nvshim: Nvshim) -> None:
    directory = tmp_path / "etc-cdi"
    spec(directory, "a.json", device("0"))
    spec(directory, "b.json", device("0"))
    broken = spec(directory, "c.json", kind="x")
    others = spec(directory, "d.json", device("1"))
    others.chmod(0o666)
    seen = nvshim("cdi", "validate", "-o", "json", ends=exits.FOUND)
    found = {
        os.path.basename(file["file"]): [each["what"] for each in file["findings"]]
        for file in seen.json["items"]
    }
    assert found == {
        "a.json": ["conflict"],
        "b.json": ["conflict"],
        "c.json": ["invalid"],
        "d.json": ["invalid"],
    }
    seen = nvshim("cdi", "validate", str(broken), f"{tmp_path}/none", ends=exits.FOUND)
    assert "no such file" in seen.out


def test_a_hook_or_a_hidden_device_is_a_warning(tmp_path: Path, nvshim: Nvshim) -> None:
    hook = {"hookName": "createContainer", "path": "/no/such/program"}
    inside = {"hookName": "startContainer", "path": "/in/the/image"}
    spec(tmp_path / "etc-cdi", "a.json", device("0", hooks=[hook, inside]))
    spec(tmp_path / "run-cdi", "b.json", device("0"))
    first, second = nvshim("cdi", "validate", "-o", "json").json["items"]
    assert [(each["what"], each["weight"]) for each in first["findings"]] == [
        ("hook", "warning"),
        ("hidden", "warning"),
    ]
    assert first["valid"]
    assert second["findings"] == []


def test_what_lies_in_memory_is_not_looked_for(tmp_path: Path, nvshim: Nvshim) -> None:
    mount = {"hostPath": "tmpfs", "containerPath": "/scratch", "type": "tmpfs"}
    bound = {"hostPath": "/no/such", "containerPath": "/x", "type": "bind"}
    path = spec(tmp_path, "a.json", device("0", mounts=[mount]), device("1", mounts=[bound]))
    (file,) = nvshim("cdi", "validate", "-o", "json", str(path), ends=exits.FOUND).json["items"]
    assert [each["subject"] for each in file["findings"]] == ["/no/such"]


# transform root

ROOT = "/run/nvidia/driver"


def moved(path: Path, nvshim: Nvshim, *words: str) -> dict[str, Any]:
    words = ("cdi", "transform", "root", "--input", str(path), "-o", "json", *words)
    made: dict[str, Any] = nvshim(*words).json
    return made


@pytest.fixture
def rooted(tmp_path: Path) -> Path:
    """Return a spec with every kind of path."""
    inside = {
        "hookName": "createContainer", "path": f"{ROOT}/bin/nvidia-cdi-hook",
        "args": ["hook", f"--link={ROOT}/a::{ROOT}/b", "--folder", f"{ROOT}/lib"],
    }  # fmt: skip
    outside = {"hookName": "createRuntime", "path": f"{ROOT}/bin/x", "args": ["x", f"{ROOT}/y"]}
    last = {"hookName": "startContainer", "path": f"{ROOT}/bin/z"}
    edits = {
        "deviceNodes": [
            {"path": "/dev/nvidia0", "hostPath": f"{ROOT}/dev/nvidia0"},
            {"path": f"{ROOT}/dev/nvidiactl"},
            {"path": "/dev/nvidia-uvm"},
        ],
        "mounts": [
            {"hostPath": f"{ROOT}/lib/a.so", "containerPath": "/lib/a.so"},
            {"hostPath": f"{ROOT}-2/lib/b.so", "containerPath": f"{ROOT}/lib/b.so"},
        ],
        "hooks": [inside, outside, last],
    }
    return spec(tmp_path, "rooted.json", device("0", **edits), device("1"), containerEdits=edits)


def test_paths_of_the_host_get_another_root(rooted: Path, nvshim: Nvshim) -> None:
    made = moved(rooted, nvshim, "--from", ROOT, "--to", "/")
    assert made["containerEdits"] == made["devices"][0]["containerEdits"]
    edits = made["containerEdits"]
    assert edits["deviceNodes"] == [
        {"path": "/dev/nvidia0", "hostPath": "/dev/nvidia0"},
        {"path": f"{ROOT}/dev/nvidiactl", "hostPath": "/dev/nvidiactl"},
        {"path": "/dev/nvidia-uvm"},
    ]
    assert [mount["hostPath"] for mount in edits["mounts"]] == [
        "/lib/a.so",
        f"{ROOT}-2/lib/b.so",
    ]
    assert edits["mounts"][1]["containerPath"] == f"{ROOT}/lib/b.so"
    inside, outside, last = edits["hooks"]
    assert inside["path"] == "/bin/nvidia-cdi-hook"
    assert inside["args"][1] == f"--link={ROOT}/a::{ROOT}/b"
    assert (outside["path"], outside["args"]) == ("/bin/x", ["x", "/y"])
    assert last["path"] == f"{ROOT}/bin/z"


def test_paths_of_the_container_get_another_root(rooted: Path, nvshim: Nvshim) -> None:
    made = moved(rooted, nvshim, "--from", ROOT, "--to", "/opt", "--relative-to", "container")
    edits = made["containerEdits"]
    assert edits["deviceNodes"][1] == {
        "path": "/opt/dev/nvidiactl",
        "hostPath": f"{ROOT}/dev/nvidiactl",
    }
    assert edits["mounts"][1] == {
        "hostPath": f"{ROOT}-2/lib/b.so",
        "containerPath": "/opt/lib/b.so",
    }
    inside, outside, last = edits["hooks"]
    assert inside["path"] == f"{ROOT}/bin/nvidia-cdi-hook"
    assert inside["args"] == ["hook", "--link=/opt/a::/opt/b", "--folder", "/opt/lib"]
    assert outside["args"] == ["x", f"{ROOT}/y"]
    assert last["path"] == "/opt/bin/z"


def test_version_rises_if_a_node_gets_a_host_path(tmp_path: Path, nvshim: Nvshim) -> None:
    path = spec(tmp_path, "a.json", device("zero", deviceNodes=[{"path": f"{ROOT}/dev/x"}]))
    path.write_text(path.read_text().replace("0.5.0", "0.3.0"))
    assert moved(path, nvshim, "--from", "/elsewhere")["cdiVersion"] == "0.3.0"
    assert moved(path, nvshim, "--from", ROOT)["cdiVersion"] == "0.5.0"


def test_a_file_may_be_changed_in_its_place_and_stdin_be_read(
    rooted: Path, nvshim: Nvshim, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = rooted.read_bytes()
    words = ["cdi", "transform", "root", "--from", ROOT]
    nvshim(*words, "--input", str(rooted), "--into", str(rooted))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert nvshim(*words, "-o", "json").json == json.loads(rooted.read_text())
    assert "NVSHIM-E2531" in nvshim(*words, "--input", "/no/such", ends=1).err
