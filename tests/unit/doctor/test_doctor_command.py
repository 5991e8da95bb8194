"""The command as a process, the support bundle, and checks that cannot run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import stat
import struct
import subprocess
import sys
import tarfile
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration import exits
from integration.doctor import observing
from integration.doctor.checks import CHECKS
from integration.doctor.errors import BundleNotWritten, CheckUnknown, ManifestUnusable, RootNotFound
from integration.doctor.examination import choose, examine
from integration.doctor.facts import Unseen
from integration.doctor.observing.containers import allowed_by_systemd
from integration.doctor.places import Places
from tests.harness.nvshim import Answer, nvshim
from tests.unit.doctor.trees import CDI, CONTAINERD, CONTAINERD_PID, OURS, Healthy, Tree


def doctor(*words: str, **variables: str) -> Answer:
    return nvshim("doctor", *words, check=False, env={**os.environ, **variables})


def test_a_healthy_node_is_zero_and_says_so_on_stderr(healthy: Healthy) -> None:
    done = doctor("--root", healthy.tree.root)
    assert done.code == exits.OK, done.stdout + done.stderr
    # Only the header, which names the node.
    titles = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert titles == ["GPUs", "engine", "nvshim"]
    assert f"; driver {healthy.driver}\n" in done.stdout
    assert done.stderr == f"{len(CHECKS)} checks: 0 errors, 0 warnings, 0 notes\n"


def test_an_error_is_three_and_told_with_its_remedy(tree: Tree) -> None:
    tree.change(OURS, "mode", "mood")
    done = doctor("--root", tree.root)
    assert done.code == exits.FOUND
    lines = done.stdout.splitlines()
    assert lines[0].startswith("GPUs    could not look: ") or "; no driver" in lines[0]
    first = lines.index("error   D070  the shim's configuration is invalid")
    assert lines.index("              nvshim config validate") > first
    # The same layout as on a terminal, whatever the length of this test's paths is.
    assert all(len(line) <= 80 for line in lines if tree.root not in line)
    # A check that a missing configuration prevents is not an error.
    heads = [line.split()[0] for line in lines[first + 1 :] if line and not line[0].isspace()]
    assert set(heads) == {"note"}
    wide = doctor("--root", tree.root, "-o", "wide", "--errors-only").stdout.splitlines()
    assert wide[0].split() == ["SEVERITY", "CODE", "WHAT", "FOUND", "DO"]
    assert len(wide) == 2
    assert wide[1].startswith("error     NVSHIM-D070")
    assert doctor("--root", tree.root, "-q", "--errors-only").stdout == "NVSHIM-D070\n"


@pytest.mark.parametrize("colours", [True, False])
def test_a_person_at_a_terminal_gets_blocks_that_are_not_cut(tree: Tree, colours: bool) -> None:
    tree.change(OURS, "mode", "mood")
    screen, keyboard = pty.openpty()
    fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "COLUMNS"}}
    words = ["doctor", "--root", tree.root, "--only", "D070"]
    done = subprocess.run(
        [sys.executable, "-m", "integration.cli", *words],
        stdout=keyboard,
        stderr=subprocess.DEVNULL,
        check=False,
        env={**environment, "TERM": "xterm", **({} if colours else {"NO_COLOR": "1"})},
    )
    os.close(keyboard)
    written = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(screen, 1 << 16):
            written += piece
    text = written.decode().replace("\r\n", "\n")
    os.close(screen)
    assert done.returncode == exits.FOUND
    assert ("\x1b[31m\x1b[1merror" in text) is colours
    lines = re.sub(r"\x1b\[\d*m", "", text).splitlines()
    assert "error   D070  the shim's configuration is invalid" in lines
    assert "              do: correct the configuration" in lines
    assert "              nvshim config validate" in lines
    assert max(len(line) for line in lines if tree.root not in line) <= 60


def test_a_warning_is_zero_and_the_document_has_every_key(tree: Tree) -> None:
    tree.change(OURS, '"default"', '"nvidia"')
    done = doctor("--root", tree.root, "-o", "json", "--only", "D071", "--only", "nvshim-d001")
    assert done.code == exits.OK
    document = json.loads(done.stdout)
    assert (document["apiVersion"], document["kind"]) == ("nvshim/v1", "Examination")
    assert document["healthy"] is True
    assert document["counts"] == {"error": 0, "warning": 1, "note": 0}
    assert document["checked"] == ["NVSHIM-D001", "NVSHIM-D071"]
    (finding,) = document["findings"]
    assert set(finding) == {
        "code", "severity", "title", "found", "remedy", "command", "reference", "unseen", "line",
    }  # fmt: skip
    assert finding["severity"] == "warning"


def test_one_check_of_a_node_without_gpu_and_driver(tmp_path: Path) -> None:
    """If `nvshim list` reports an error, the check must not pass."""
    for directory in ("proc/self", "sys/bus/pci/devices", "dev", "etc"):
        (tmp_path / directory).mkdir(parents=True)
    done = doctor("--root", str(tmp_path), "--only", "D001", "-o", "json")
    assert done.code == exits.OK
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["severity"], finding["unseen"]) == ("note", False)
    assert "no libcuda.so" in finding["found"]
    assert "the PCI bus has no NVIDIA GPU" in finding["found"]
    told = doctor("--root", str(tmp_path), "--only", "D001")
    assert told.stderr == "1 check: 0 errors, 0 warnings, 1 note\n"
    head = told.stdout.splitlines()[:3]
    assert head[:2] == ["GPUs    none; no driver", "engine  none found"]
    assert head[2].startswith("nvshim  0.")
    assert head[2].endswith("; not installed")


def _moved(tree: Tree, directory: str) -> None:
    elsewhere = "/proc/driver/nvidia/gpus/0000:99:00.0"
    tree.change(f"{directory}/information", os.path.basename(directory), "0000:99:00.0")
    os.rename(tree.at(directory), tree.at(elsewhere))


_CONFLICTS: dict[str, tuple[Callable[[Tree, str], None], str, str]] = {
    "another UUID": (
        lambda tree, at: tree.change(
            f"{at}/information", "GPU UUID: \t GPU-", "GPU UUID: \t GPU-0"
        ),
        "",
        "procfs GPU-0",
    ),
    "another address": (_moved, "", "procfs at 0000:99:00.0"),
    "another minor": (
        lambda tree, at: tree.change(f"{at}/information", "Minor: \t 1", "Minor: \t 9"),
        "",
        "/dev/nvidia1, procfs as /dev/nvidia9",
    ),
    "NVML has more": (
        lambda tree, at: tree.remove(at),
        "",
        "NVML has GPU 1",
    ),
    "NVML has fewer": (lambda *_: None, "count=1", "NVML does not count it"),
    "another version": (lambda *_: None, "driver=550.54.15", "NVML has driver version 550.54.15"),
}


@pytest.mark.parametrize("case", _CONFLICTS)
def test_nvml_and_procfs_disagree(healthy: Healthy, tree: Tree, case: str) -> None:
    change, faults, words = _CONFLICTS[case]
    gpu = healthy.simulated.scenario.gpus[1]
    change(tree, f"/proc/driver/nvidia/gpus/{gpu.pci}")
    path = os.path.join(healthy.simulated.state, "nvml-faults")
    with open(path, "w", encoding="ascii") as file:
        file.write(faults)
    try:
        done = doctor("--root", tree.root, "--only", "D016", "-o", "json")
    finally:
        os.unlink(path)
    assert done.code == exits.FOUND, done.stdout
    findings = json.loads(done.stdout)["findings"]
    assert {finding["code"] for finding in findings} == {"NVSHIM-D016"}
    assert any(words in finding["found"] for finding in findings), findings


def test_checks_can_be_skipped_and_listed(tree: Tree) -> None:
    tree.change(OURS, '"default"', '"nvidia"')
    both = ("--only", "D071", "--only", "D001")
    done = doctor("--root", tree.root, "-o", "yaml", *both, "--skip", "D071")
    assert "checked:\n- NVSHIM-D001\n" in done.stdout
    assert "skipped:\n- NVSHIM-D071\n" in done.stdout
    listing = doctor("--list", "-o", "json")
    listed = json.loads(listing.stdout)["items"]
    assert [check["code"] for check in listed] == [c.code for c in CHECKS]
    assert all(check["why"] and check["remedy"] for check in listed)
    assert max(map(len, doctor("--list").stdout.splitlines())) <= 80


def test_an_examination_without_a_check_is_refused(tree: Tree) -> None:
    done = doctor("--root", tree.root, "--only", "D071", "--skip", "D071")
    assert done.code == exits.USAGE
    assert "leave no check" in done.stderr
    tree.write(OURS, f"[doctor]\nskip = {json.dumps([check.code for check in CHECKS])}\n")
    assert doctor("--root", tree.root).code == exits.USAGE
    assert doctor("--root", tree.root, "--only", "D071").code != exits.USAGE


def test_what_the_configuration_skips_is_counted_and_can_be_asked_for(tree: Tree) -> None:
    tree.change(OURS, '"default"', '"nvidia"')
    tree.write(OURS, tree.read(OURS) + '\n[doctor]\nskip = ["D071", "NVSHIM-D082", "D999"]\n')
    done = doctor("--root", tree.root)
    assert "D071" not in done.stdout
    assert done.stderr == (
        "doctor.skip has no effect for D999\n"
        f"{len(CHECKS) - 2} checks: 0 errors, 0 warnings, 0 notes; 2 skipped\n"
    )
    also = json.loads(doctor("--root", tree.root, "--skip", "D001", "-o", "json").stdout)
    assert also["skipped"] == ["NVSHIM-D001", "NVSHIM-D071", "NVSHIM-D082"]
    assert "D071" in doctor("--root", tree.root, "--only", "D071").stdout


def test_known_vulnerabilities_are_a_line_each(tree: Tree) -> None:
    for name, said in (("runc", "runc version 1.1.4"), ("crun", "crun version 1.8.1")):
        tree.script(f"/usr/bin/{name}", f"echo {said}")
    words = ("--root", tree.root, "--only", "D020", "--only", "D021")
    lines = doctor(*words).stdout.splitlines()[4:]
    assert [line[:14] for line in lines] == ["error   D020  ", "warning D021  "]
    assert lines[0].startswith("error   D020  runc 1.1.4: ")
    assert " known CVEs; update to " in lines[0]
    assert max(map(len, lines)) <= 80
    assert "CVE-2024-21626" not in "".join(lines)
    assert "CVE-2024-21626" in doctor(*words, "-v").stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--only", "D999"], CheckUnknown.code),
        (["--root", "/no/such/place"], RootNotFound.code),
        (["--manifest", "/no/such/file", "--only", "D043"], ManifestUnusable.code),
        (["--bundle", "/no/such/place/b.tar.gz", "--only", "D070"], BundleNotWritten.code),
    ],
)
def test_what_cannot_be_examined_is_one_line_and_one(words: list[str], code: str) -> None:
    done = doctor(*words)
    assert done.code == exits.FAILED
    assert done.stdout == ""
    assert done.stderr.startswith(code)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["a: [", "!!bool x", "a: 2001-99-99"])
def test_yaml_that_is_not_valid_is_one_line(healthy: Healthy, tmp_path: Path, text: str) -> None:
    path = tmp_path / "classes.yaml"
    path.write_text(text)
    done = doctor("--root", healthy.tree.root, "--manifest", str(path), "--only", "D043")
    assert (done.code, done.stdout) == (exits.FAILED, "")
    assert done.stderr.startswith(f"{ManifestUnusable.code} ")
    assert "not valid YAML" in done.stderr


def test_a_bundle_has_facts_and_findings_and_no_secret(healthy: Healthy, tmp_path: Path) -> None:
    path = tmp_path / "doctor.tar.gz"
    path.write_text("of before")
    done = doctor("--root", healthy.tree.root, "--bundle", str(path), SECRET="hunter2")
    assert done.code == exits.OK
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["doctor.tar.gz"]
    files: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            files[member.name] = content.read().decode()
    assert set(files) == {f"nvshim-doctor/{n}" for n in ("README", "facts.json", "findings.json")}
    facts = json.loads(files["nvshim-doctor/facts.json"])
    assert facts["driver"]["version"] == healthy.driver
    assert facts["containerd"]["handlers"]
    # containerd's environment, its configuration and daemon.json each contain one.
    assert "hunter2" in healthy.tree.read(CONTAINERD)
    assert not any("hunter2" in text for text in files.values())
    assert not any("TOKEN" in text for text in files.values())


def test_a_bundle_replaces_nothing_but_a_file(healthy: Healthy, tmp_path: Path) -> None:
    target = tmp_path / "device"
    os.mkfifo(target)
    done = doctor("--root", healthy.tree.root, "--only", "D070", "--bundle", str(target))
    assert done.stderr.startswith(BundleNotWritten.code)
    assert stat.S_ISFIFO(target.stat().st_mode)


def test_a_path_that_is_no_text_does_not_keep_a_bundle_from_being_written(
    tree: Tree, tmp_path: Path
) -> None:
    environment = tree.at(f"/proc/{CONTAINERD_PID}/environ")
    os.unlink(environment)
    with open(environment, "wb") as file:
        file.write(b"PATH=/sbin\xff\0")
    path = tmp_path / "doctor.tar.gz"
    done = doctor("--root", tree.root, "--only", "D037", "--bundle", str(path))
    assert done.code == exits.FOUND, done.stderr
    assert "/sbin?" in done.stdout
    assert tarfile.is_tarfile(path)


def test_only_what_the_checks_need_is_gathered(healthy: Healthy) -> None:
    node = examine(healthy.tree.places(), choose(["D070"])).node
    assert not isinstance(node.policy, Unseen)
    assert isinstance(node.driver, Unseen)
    assert isinstance(node.nvml, Unseen)


def test_a_look_that_hangs_or_fails_costs_its_own_group(
    healthy: Healthy, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def hang(_: Places) -> Any:
        over.wait()

    def fail(_: Places) -> Any:
        raise PermissionError(13, "Permission denied", "/some\x1bwhere")

    def stumble(_: Places) -> Any:
        return dict[str, str]()["no such key"]

    groups = {**observing.GROUPS, "driver": hang, "cdi": fail, "machine": stumble}
    monkeypatch.setattr(observing, "GROUPS", groups)
    checks = choose(["D001", "D060", "D070", "D083"])
    try:
        findings = examine(healthy.tree.places(patience=3), checks).findings
    finally:
        over.set()
    assert {f.code: f.found for f in findings} == {
        "NVSHIM-D001": "could not look: it took longer than 3 s",
        "NVSHIM-D060": "could not look: /some?where Permission denied",
        "NVSHIM-D083": "could not look: the data is malformed: KeyError: 'no such key'",
    }


def test_a_node_below_a_root_is_not_left_by_its_links(tree: Tree) -> None:
    places = tree.places()
    assert places.at("/var/run/cdi/nvidia.json") == tree.at(CDI)
    # Also before any exist: the host's /run is not the node's.
    assert places.at("/var/run/not/there") == tree.at("/run/not/there")
    assert places.at("/../../etc") == tree.at("/etc")
    assert places.config().cdi_spec_dirs == (tree.at("/etc/cdi"), tree.at("/run/cdi"))
    assert Places().at("/var/run/cdi") == "/var/run/cdi"


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        ("DeviceAllow=/dev/char/195:0 rwm\nDevicePolicy=strict\n", [(195, 0)]),
        ("DeviceAllow=/dev/nvidia0 rw /dev/null r\nDevicePolicy=closed\n", [(195, 0)]),
        ("DeviceAllow=/dev/char/*:* m\nDevicePolicy=strict\n", []),
        ("DeviceAllow=char-nvidia rw\nDevicePolicy=strict\n", [(195, -1)]),
        ("DeviceAllow=char-gone rw\nDevicePolicy=strict\n", []),
        ("DevicePolicy=auto\n", None),
        ("", None),
    ],
)
def test_what_a_unit_of_systemd_allows(said: str, allowed: Any) -> None:
    numbers = {"/dev/nvidia0": (195, 0), "/dev/null": (1, 3), "char-nvidia": (195,)}
    assert allowed_by_systemd(said, numbers.get) == allowed
