"""Each check on a node with its fault, and on a healthy one."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tomllib
from typing import Any

import click
import pytest

from integration.cli.app import nvshim
from integration.doctor.checks import CHECKS
from integration.doctor.examination import Examination, choose, examine, judge
from integration.doctor.facts import Node, Unseen
from integration.doctor.findings import TABLE, Finding, Severity
from integration.doctor.observing import GROUPS
from integration.nvml import query
from tests.harness.waiting import eventually
from tests.unit.doctor.breaks import (
    ELSEWHERE_ONLY,
    EVIDENCE,
    MODULES,
    OPTIONS,
    PROGRAM,
    RUNTIMES,
    container_of,
    in_k0s,
    in_version_1,
    module_of_another_version,
    of_runcs_type,
    pod_of_verify,
    sandboxer_of,
    without_containerd,
)
from tests.unit.doctor.sick import ELSEWHERE, ERROR, NOTE, SICK, WARNING
from tests.unit.doctor.trees import (
    BUNDLE,
    CONTAINERD,
    CONTAINERD_PID,
    DAEMON,
    DROP_IN,
    HANDLER,
    KUBELET,
    SERVER_PID,
    Healthy,
    Tree,
)


def found(tree: Tree, code: str) -> list[Finding]:
    return list(examine(tree.places(), choose([code])).findings)


@pytest.mark.parametrize("name", SICK)
def test_what_is_wrong_is_found(tree: Tree, name: str) -> None:
    make_sick, code, severity, words = SICK[name]
    make_sick(tree)
    findings = found(tree, code)
    assert {f.code for f in findings} == {f"NVSHIM-{code}"}
    assert findings[0].severity is severity, findings
    assert any(words in f.found for f in findings), findings
    assert all(f.remedy and f.title for f in findings)


def test_each_row_of_the_table_has_a_function() -> None:
    with open(TABLE, "rb") as file:
        rows = tomllib.load(file)
    assert [f"NVSHIM-{code}" for code in sorted(rows)] == [check.code for check in CHECKS]
    assert all(row["title"] and row["why"] and row["remedy"] for row in rows.values())


def test_on_a_healthy_node_no_check_says_anything(healthy: Healthy) -> None:
    def look() -> list[Examination]:
        seen = examine(healthy.tree.places())
        # On a busy machine programs are slow, NVML's included.
        return [] if {found.code for found in seen.findings} == {"NVSHIM-D005"} else [seen]

    (examination,) = eventually(look, "NVML answers at once")
    assert examination.findings == ()
    assert not any(isinstance(getattr(examination.node, group), Unseen) for group in GROUPS)


def test_a_program_of_another_machine_is_none_of_the_node_s(tree: Tree) -> None:
    assert os.access(ELSEWHERE_ONLY, os.X_OK)
    tree.link("/usr/bin/containerd-shim-nvidia-v1", ELSEWHERE_ONLY)
    assert not found(tree, "D092")
    tree.link("/usr/bin/crun", ELSEWHERE_ONLY)
    node = examine(tree.places(), choose(["D020"])).node
    assert not isinstance(node.programs, Unseen)
    assert "crun" not in {program.name for program in node.programs}


def test_a_container_that_has_ended_is_nobody_s_trouble(tree: Tree) -> None:
    module_of_another_version(tree)
    in_version_1("")(tree)
    codes = ["D100", "D101", "D102", "D103"]
    assert {f.code[-4:] for f in examine(tree.places(), choose(codes)).findings} == {"D100", "D101"}
    # Another process has its pid now; then no process has.
    tree.write("/proc/970/cgroup", "5:devices:/user\n0::/user.slice\n")
    assert examine(tree.places(), choose(codes)).findings == ()
    tree.remove("/proc/970")
    assert examine(tree.places(), choose(codes)).findings == ()


def test_containers_are_looked_for_where_containerd_keeps_them(tree: Tree) -> None:
    in_version_1("")(tree)
    tree.write(CONTAINERD, f'state = "/srv/containerd"\n{tree.read(CONTAINERD)}')
    assert found(tree, "D100") == []
    os.renames(tree.at("/run/containerd"), tree.at("/srv/containerd"))
    assert len(found(tree, "D100")) == 1


def test_a_fork_server_that_prepares_itself_or_has_just_ended_is_nobody_s_trouble(
    tree: Tree,
) -> None:
    tree.remove(f"/proc/{SERVER_PID}/fd/4")

    def look(state: str, begun: int) -> list[str]:
        tree.began(SERVER_PID, begun, state)
        return [f.found for f in examine(tree.places(), choose(["D096"])).findings]

    assert look("S", 3600) == []
    assert len(look("S", -3600)) == len(look("T", 3600)) == 1
    assert look("Z", -3600) == []


def test_every_check_has_a_node_that_is_sick_of_it() -> None:
    tried = {code for _, code, _, _ in SICK.values()} | ELSEWHERE
    assert {check.code for check in CHECKS} == {f"NVSHIM-{code}" for code in tried}


def test_the_table_is_in_order_and_says_all_that_the_reference_needs() -> None:
    codes = [check.code for check in CHECKS]
    assert codes == sorted(set(codes))
    for check in CHECKS:
        assert re.fullmatch(r"NVSHIM-D\d{3}", check.code)
        assert check.title
        assert check.title[-1] not in ".!"
        assert check.why.endswith((".", "]]."))
        assert check.remedy
        assert check.reference == "" or check.reference.startswith("https://")
        assert set(check.needs) <= set(GROUPS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)
def test_a_check_that_is_blind_says_so(check: Any) -> None:
    (finding,) = judge(Node(), [check])
    assert finding.unseen
    assert finding.severity is Severity.NOTE
    assert finding.found == "could not look: it was not requested"


def test_nvml_that_fails_and_one_that_is_slow(healthy: Healthy) -> None:
    faults = os.path.join(healthy.simulated.state, "nvml-faults")
    cases = {
        "nvmlInit=error:999": (ERROR, "NVMLError"),
        "nvmlInit=sleep:2200": (WARNING, "it answered after "),
        "gpu1=error:15": (ERROR, "GPU is lost"),
        "gpu1.nvmlDeviceGetBrand=error:999": (WARNING, "nvmlDeviceGetBrand: Unknown Error"),
    }
    for fault, (severity, words) in cases.items():
        with open(faults, "w") as file:
            file.write(fault)
        try:
            (finding,) = found(healthy.tree, "D005")
        finally:
            os.unlink(faults)
        assert finding.severity is severity
        assert words in finding.found
    eventually(lambda: not found(healthy.tree, "D005"), "NVML answers at once")


def test_a_driver_that_is_shut_down_when_nobody_uses_it(tree: Tree) -> None:
    tree.remove("/run/nvidia-persistenced")
    (finding,) = found(tree, "D006")
    assert finding.severity is WARNING
    assert "persistence mode is off" in finding.found


def test_a_kernel_without_openat2(healthy: Healthy) -> None:
    from dataclasses import replace  # noqa: PLC0415 - of this test alone

    checks = choose(["D083"])
    node = examine(healthy.tree.places(), checks).node
    assert judge(node, checks) == ()
    assert not isinstance(node.machine, Unseen)
    old = replace(node, machine=replace(node.machine, kernel="5.4.0", openat2=False))
    (finding,) = judge(old, checks)
    assert "5.4.0" in finding.found


def test_what_a_package_s_changelog_names_is_fixed(tree: Tree) -> None:
    tree.script("/usr/bin/runc", "echo runc version 1.1.5+ds1")
    (bare,) = found(tree, "D020")
    assert bare.severity is ERROR
    changelog = "runc (1.1.5+ds1-1+deb12u9)\n  * Fix CVE-2024-21626, CVE-2025-31133\n"
    tree.package("runc", "1.1.5+ds1-1+deb12u9", "/bin/runc", changelog)
    (packaged,) = found(tree, "D020")
    assert packaged.severity is WARNING
    assert "CVE-2024-21626" not in packaged.found
    assert "CVE-2025-52881" in packaged.found
    assert "1.1.5+ds1-1+deb12u9" in packaged.found
    assert "may have fixed them" in packaged.found
    tree.package("runc", "2", "/bin/runc", f"{changelog}{bare.found}")
    assert found(tree, "D020") == []


def test_a_node_that_has_just_booted_has_lost_nothing(tree: Tree) -> None:
    # Modules are loaded on demand: the first container's shim loads them.
    tree.remove("/proc/driver/nvidia", *(f"/sys/module/{m}" for m in MODULES))
    tree.change("/proc/devices", "nvidia", "nobody")
    codes = ("D001", "D002", "D004", "D007", "D008", "D009")
    (finding,) = examine(tree.places(), choose(codes)).findings
    assert finding.code == "NVSHIM-D007"
    assert finding.severity is NOTE


def test_every_command_that_is_advised_is_one() -> None:
    for check in CHECKS:
        for line in filter(None, check.command.split(" && ")):
            program, *words = line.split()
            if program != "nvshim":
                continue
            command: Any = nvshim
            while isinstance(command, click.Group):
                name = words.pop(0)
                found = command.get_command(click.Context(command), name)
                assert found is not None, line
                command = found
            # Without running it: the arguments are parsed, or rejected as a usage error.
            command.make_context(program, words)


@pytest.mark.parametrize("whose", [{"uid": 1000}, {"mounts": 7}], ids=["user", "container"])
def test_a_process_that_only_calls_itself_containerd_is_not_believed(
    tree: Tree, whose: dict[str, Any]
) -> None:
    # Root would run its program, and read its configuration instead of the node's.
    tree.script("/home/evil/containerd", f"echo >{EVIDENCE}", "exit 1")
    tree.write("/home/evil/config.toml", "version = 2\n")
    tree.remove(f"/proc/{CONTAINERD_PID}")
    words = ("containerd", "--config", "/home/evil/config.toml")
    tree.process(CONTAINERD_PID, *words, **whose)
    tree.link(f"/proc/{CONTAINERD_PID}/exe", "/home/evil/containerd")
    containerd = examine(tree.places(), choose(["D030", "D031"])).node.containerd
    assert containerd is not None
    assert not isinstance(containerd, Unseen)
    assert (containerd.pid, containerd.path, containerd.dump_fault) == (0, CONTAINERD, "")
    assert not os.path.exists(tree.at(EVIDENCE))
    # It is reported for a process of root in the node's namespace.
    tree.process(CONTAINERD_PID, *words)
    assert {f.code for f in examine(tree.places(), choose(["D030"])).findings} == {"NVSHIM-D030"}
    assert os.path.exists(tree.at(EVIDENCE))


def test_names_of_others_stay_on_their_line(tree: Tree) -> None:
    name = "evil\\u001b[31m\\n"
    tree.write(CONTAINERD, tree.read(CONTAINERD) + f'{RUNTIMES}."{name}"]\n')
    without_containerd(tree)
    (finding,) = found(tree, "D035")
    assert finding.found.isprintable()
    assert "evil?[31m" in finding.found


def test_containerd_s_own_word_counts_and_not_what_the_files_seem_to_say(tree: Tree) -> None:
    # containerd 1 takes the plugin's whole section from the drop-in, none from the main file.
    assert found(tree, "D032") == found(tree, "D045") == []
    other = f'version = 2\n{RUNTIMES}.kata]\nruntime_type = "io.containerd.kata.v2"\n'
    tree.write("/etc/containerd/conf.d/zz-other.toml", other)
    (finding,) = found(tree, "D032")
    assert "merged configuration differs" in finding.found


def test_own_handler_of_containerd_that_a_drop_in_takes_away_is_named(tree: Tree) -> None:
    """This happens on a node that was downgraded from containerd 2 to 1."""
    tree.write(CONTAINERD, 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    assert found(tree, "D045") == []
    tree.write(DROP_IN, f"version = 2\n{HANDLER}")
    (finding,) = found(tree, "D045")
    assert f"built-in handler runc is overridden by {DROP_IN}" in finding.found


@pytest.mark.parametrize("text", ["", " \n", "null\n", '\ufeff{"debug": true}'])
def test_daemon_json_that_dockerd_reads_is_no_fault(tree: Tree, text: str) -> None:
    tree.write(DAEMON, text)
    assert found(tree, "D050") == []
    tree.write(DAEMON, "[]")
    assert len(found(tree, "D050")) == 1


@pytest.mark.parametrize("pattern", ["/etc/containerd/*.d/*.toml", "/etc/*/conf.d/99-*.toml"])
def test_drop_in_that_is_imported_by_a_pattern_for_its_directory_is_imported(
    tree: Tree, pattern: str
) -> None:
    tree.write(CONTAINERD, f'version = 2\nimports = ["{pattern}"]\n')
    tree.write(DROP_IN, f"version = 2\n{HANDLER}")
    without_containerd(tree)
    assert found(tree, "D032") == []


@pytest.mark.parametrize(
    ("version", "is_silent"),
    [
        ("1.7.30", False), ("2.0.0", True), ("2.2.6", True), ("2.2.7", False), ("2.3.0", True),
        ("2.3.3", True), ("2.3.4", False), ("2.4.0", False),
    ],
)  # fmt: skip
def test_user_namespaces_need_runcs_type_where_containerd_asks_no_other(
    tree: Tree, version: str, *, is_silent: bool
) -> None:
    tree.change("/usr/bin/containerd", "v2.3.5", f"v{version}")
    assert bool(found(tree, "D047")) is is_silent
    of_runcs_type()(tree)
    assert found(tree, "D047") == []


def test_gpu_that_nvml_cannot_open_by_a_wrong_node_needs_no_reset(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(*args: Any, **more: Any) -> bytes:
        answer = json.loads(query.probe(*args, **more) or b"")
        answer["gpus"][0]["lost"] = "GPU is lost"
        return json.dumps(answer).encode()

    monkeypatch.setattr("integration.doctor.observing.nvml.probe", probe)
    (lost,) = found(tree, "D005")
    assert lost.remedy.startswith("reset the GPU")
    tree.remove("/dev/nvidia0")
    tree.write("/dev/nvidia0", "")
    assert found(tree, "D005") == []
    assert [each.found for each in found(tree, "D009")]


def test_containers_that_name_their_capabilities_are_not_counted(tree: Tree) -> None:
    container_of(NVIDIA_DRIVER_CAPABILITIES="compute,utility")(tree)
    assert found(tree, "D113") == []
    tree.remove(f"{BUNDLE}/config.json")
    assert found(tree, "D113") == []


def test_a_pod_of_a_verification_that_is_running_is_not_left(tree: Tree) -> None:
    pod_of_verify(tree)
    directory = f"{tree.places().config().state}/verify"
    os.makedirs(directory)
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert found(tree, "D114") == []
    finally:
        os.close(fd)
    assert found(tree, "D114") != []


def test_k0s_configuration_that_somebody_has_taken_over_is_not_written_anew(tree: Tree) -> None:
    in_k0s(tree, mark="")
    assert found(tree, "D039") == []
    in_k0s(tree)
    tree.write("/etc/k0s/containerd.d/nvshim.toml", HANDLER)
    assert found(tree, "D039") == [], "k0s puts what is there into each new file"


@pytest.mark.parametrize("version", ["v2.3.0", "2.3.0+unknown", "2.3.0-0ubuntu1", "v2.4.0-beta.0"])
def test_sandboxer_is_no_fault_where_containerd_survives_it(tree: Tree, version: str) -> None:
    sandboxer_of(version)(tree)
    assert found(tree, "D049") == []


def test_handler_of_runcs_type_that_calls_our_shim_is_ours(tree: Tree) -> None:
    of_runcs_type()(tree)
    codes = [f"D0{number}" for number in (31, 32, 36, 37, 40, 41, 44, 45, 48, 53)]
    examination = examine(tree.places(), choose(codes))
    assert examination.findings == ()
    assert not isinstance(examination.node.containerd, Unseen)
    assert examination.node.containerd is not None
    assert [h.name for h in examination.node.containerd.handlers if h.is_ours] == ["nvidia"]
    # Without runtime_path, containerd would run runc's shim.
    tree.change(CONTAINERD, f'runtime_path = "{PROGRAM}"\n', "")
    tree.remove(DAEMON)
    assert {each.code for each in found(tree, "D031")} == {"NVSHIM-D031"}


def test_handler_of_our_type_needs_no_option_for_cgroups(tree: Tree) -> None:
    tree.change(CONTAINERD, OPTIONS, "")
    assert found(tree, "D041") == []
    text = tree.read(CONTAINERD).replace("SystemdCgroup = true", "SystemdCgroup = false")
    tree.write(CONTAINERD, text)
    tree.change(KUBELET, "systemd", "cgroupfs")
    assert found(tree, "D041") == []
    tree.remove(KUBELET)
    assert found(tree, "D042") == []
