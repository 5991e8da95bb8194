"""What an option names may be of another kind, empty or too long: one line, and no waiting."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from integration import exits
from integration.cli.app import main
from integration.cli.drain import show
from integration.cli.output import Format, Output
from tests.harness.launcher import REPOSITORY

_LINE: Final = re.compile(r"NVSHIM-E\d{4} [a-z-]+: .*([Pp]ipe|No such device).*\n")
_SPEC: Final = {
    "cdiVersion": "0.5.0",
    "kind": "vendor.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}],
}


@pytest.mark.parametrize(
    "words",
    [
        "list --config {tmp}/fifo",
        "ledger claims --config {tmp}/fifo",
        "cdi generate --config {tmp}/fifo",
        "cdi transform root --from / --input {tmp}/spec.json --file {tmp}/fifo",
        "doctor --only D041 --manifest {tmp}/fifo",
        "explain {tmp}/fifo.json",
        "configure containerd --config {tmp}/fifo --dry-run",
        "configure docker --config {tmp}/fifo --remove --dry-run",
        "simulate create {tmp}/node --scenario {tmp}/fifo",
    ],
)
@pytest.mark.parametrize("form", ["", " -o json"])
def test_nobody_is_waited_for(
    words: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "fifo.json").symlink_to("fifo")
    (tmp_path / "spec.json").write_text(json.dumps(_SPEC))
    before = sorted(os.listdir(tmp_path))
    assert main(f"{words}{form}".format(tmp=tmp_path).split()) == exits.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    if form:
        assert json.loads(err)["error"]["code"].startswith("NVSHIM-E")
    else:
        assert _LINE.fullmatch(err)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "words",
    [
        "ledger check --containerd-state {tmp}/fifo",
        "ledger list --procfs {tmp}/fifo",
        "drain 0 --containerd-state /dev/null",
        "devices create --dev-root {tmp}/fifo",
        "devices create --driver-root /dev/null",
        "simulate create node --in {tmp}/fifo",
        "simulate create node --cache /dev/zero",
        "simulate list --in {tmp}/file/below",
        "simulate create node --in {long}",
        "simulate create {tmp}/node --cache {long}",
        "ledger list --containerd-state {long}",
        "node --once --containerd-state {tmp}/fifo",
    ],
)
@pytest.mark.parametrize("form", ["", " -o json"])
def test_what_is_no_directory_is_refused(
    words: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    before = sorted(os.listdir(tmp_path))
    line = f"{words}{form}".format(tmp=tmp_path, long="/a" * 2500)
    assert main(line.split()) == exits.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    message = json.loads(err)["error"]["message"] if form else err
    assert re.search(r": (not a directory|file name too long)\. ", message)
    assert "NVSHIM-E2502" in err
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "words",
    ["list", "ledger check", "drain 0", "cdi generate", "devices create", "verify", "doctor"],
)
def test_an_empty_configuration_is_not_the_nodes_own(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--config", ""]) == exits.USAGE
    assert "Invalid value for '--config': An empty path." in capsys.readouterr().err


def test_an_empty_directory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "list", "--containerd-state", ""]) == exits.USAGE
    assert "An empty path." in capsys.readouterr().err


def test_an_empty_device_is_not_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", " ,"):
        assert main(["cdi", "generate", "--device", name]) == exits.USAGE
        assert "names no device" in capsys.readouterr().err


def test_a_reason_that_a_mark_has_no_room_for_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["drain", "0", "--reason", "x" * 1001]) == exits.USAGE
    assert "Longer than 1000 characters" in capsys.readouterr().err


def test_a_reason_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    device = {"name": "GPU 0", "why": "since now: \x1b]0;title\x07"}
    show(Output(Format.TABLE), {"devices": [device], "holders": [], "free": True})
    assert "\x1b" not in capsys.readouterr().out


def test_a_file_name_controls_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(_SPEC))
    words = ["cdi", "transform", "root", "--from", "/", "--input", f"{tmp_path}/spec.json"]
    assert main([*words, "--file", f"{tmp_path}/\x1b[31mred"]) == exits.OK
    assert "\x1b" not in capsys.readouterr().err


def test_a_spec_that_was_written_stays_so_if_stderr_is_full(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(_SPEC))
    words = [
        "cdi",
        "transform",
        "root",
        "--from",
        "/",
        "--input",
        "spec.json",
        "--file",
        "made.json",
    ]
    program = [sys.executable, "-m", "integration.cli", *words]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            program, stderr=full, check=False, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
    assert done.returncode == exits.OK
    assert (tmp_path / "made.json").exists()


@pytest.mark.parametrize("option", ["--kubeconfig", "--containerd-config"])
@pytest.mark.parametrize("path", ["{tmp}/fifo", "/dev/zero", "{tmp}"])
def test_the_doctor_gives_no_program_what_never_ends(
    option: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    named = path.format(tmp=tmp_path)
    assert main(["doctor", "--only", "D041", option, named]) == exits.FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"NVSHIM-E2502 file-unusable: cannot use {named}: not a file. ")


@pytest.mark.parametrize("form", ["table", "json"])
def test_nothing_is_checked_with_a_configuration_that_cannot_be_read(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    # As its help says: 1 is for a check that failed.
    assert main(["verify", "--config", missing, "-o", form]) == exits.USAGE
    err = capsys.readouterr().err
    assert "NVSHIM-E0501" in err
    if form == "json":
        assert json.loads(err)["error"]["code"] == "NVSHIM-E0501"


def test_a_node_whose_path_is_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "create", "/a" * 2500]) == exits.FAILED
    assert capsys.readouterr().err.startswith("NVSHIM-E2108 node-unwritten: ")


@pytest.mark.parametrize("name", ["", ".", ".."])
@pytest.mark.parametrize("command", ["create", "show", "remove", "run"])
def test_the_directory_of_simulated_nodes_is_no_node(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--node", name, "--", "true"] if command == "run" else [name]
    store = tmp_path / "above" / "store"
    store.mkdir(parents=True)
    assert main(["simulate", command, "--in", str(store), *words]) == exits.USAGE
    assert f"{name!r} is not a name" in capsys.readouterr().err
    assert os.listdir(store) == []


def test_no_gpus_are_an_option_of_a_new_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "run", "--node", f"{tmp_path}/node", "--gpus", "0", "--", "true"]
    assert main(words) == exits.USAGE
    assert "--node already has its GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["simulate create /tmp/no/node --scenario {tmp}/none", "simulate create x --scenario {tmp}"],
)
def test_an_error_has_no_number_of_the_kernel(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.format(tmp=tmp_path).split()) == exits.FAILED
    err = capsys.readouterr().err
    assert err.startswith("NVSHIM-E2101 scenario-invalid: ")
    assert "Errno" not in err


def test_a_verification_without_a_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--only", "gpu", "--skip", "gpu"]) == exits.USAGE
    assert "leaves no check" in capsys.readouterr().err
