from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hooks import engine
from hooks.config import Config
from hooks.errors import MalformedSpec
from hooks.node.inventory import survey, take_inventory
from integration.containers.bundles import Container, Pod, find_containers
from integration.containers.errors import ContainerAmbiguous, ContainerUnknown
from integration.inspection.explaining import (
    Explanation,
    explain_container,
    find_container,
    rootfs_of,
)
from integration.inspection.summary import summarize
from integration.inspection.timeline import render
from integration.simulated import Scenario, SimulatedNode
from tests.harness.nvshim import nvshim
from tests.harness.raising import raises
from tests.unit.cli.test_completion import complete
from tests.unit.hooks.fake_node import VERSION, Elves, Node, nvml_gpu, uuid_of


@pytest.fixture
def bundle(tmp_path: Path, elves: Elves) -> Path:
    """Make the bundle of a container that requests everything, with a Debian-like image."""
    bundle = tmp_path / "bundle"
    rootfs = bundle / "rootfs"
    elves.write(rootfs / "usr/lib64/ld-linux-x86-64.so.2", "ld-linux-x86-64.so.2")
    elves.write(rootfs / "usr/lib/x86_64-linux-gnu/libc.so.6", "libc.so.6")
    (rootfs / "lib64").symlink_to("usr/lib64")
    (rootfs / "lib").symlink_to("usr/lib")
    (rootfs / "etc").mkdir()
    write_spec(bundle, "NVIDIA_VISIBLE_DEVICES=all")
    return bundle


def write_spec(bundle: Path, *environment: str, namespace: str = "") -> None:
    """Write the spec of a container, optionally in a pod."""
    spec: dict[str, Any] = {
        "process": {"env": list(environment), "user": {"uid": 0, "gid": 0}},
        "root": {"path": "rootfs"},
    }
    if namespace:
        spec["annotations"] = {"io.kubernetes.cri.sandbox-namespace": namespace}
    (bundle / "config.json").write_text(json.dumps(spec))


Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explain(bundle: Path, config_file: str) -> Explain:
    """Explain the bundle as a user does, in its own process."""

    def explain(*words: str, config: str = config_file) -> tuple[int, str, str]:
        spec = str(bundle / "config.json")
        done = nvshim("explain", spec, "--config", config, *words, check=False)
        return done.code, done.stdout, done.stderr

    return explain


def everything_below(*places: Path | str) -> str:
    """Return one hash of all names, types, times and contents below some paths."""
    seen = hashlib.sha256()
    for place in places:
        for directory, names, files in sorted(os.walk(place)):
            for name in sorted((*names, *files)):
                path = os.path.join(directory, name)
                status = os.lstat(path)
                seen.update(f"{path} {status.st_mode} {status.st_mtime_ns}\n".encode())
    return seen.hexdigest()


def told(devices: int = 2) -> bytes:
    return json.dumps(
        {"driver": VERSION, "gpus": [nvml_gpu(index) for index in range(devices)]}
    ).encode()


def test_it_tells_request_grant_edits_and_reasons_and_changes_nothing(
    node: Node, bundle: Path, explain: Explain
) -> None:
    before = everything_below(bundle, node.base)
    status, story, errors = explain("-v", "--diff")
    assert (status, errors) == (0, "")
    assert everything_below(bundle, node.base) == before
    for line in (
        "devices all, by NVIDIA_VISIBLE_DEVICES=all",
        f"GPU 0: NVIDIA H100, {uuid_of(0)}, at ",
        f"driver {VERSION} in {node.config.driver_root}; without NVML: ",
        "x86_64, glibc: libraries go to /usr/lib/x86_64-linux-gnu",
        "195:0 rwm",
        f"/usr/lib/x86_64-linux-gnu/libcuda.so.1 to libcuda.so.{VERSION} (soname)",
        "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/x86_64-linux-gnu",
        "not part of this driver, which is normal: ",
    ):
        assert line in story, line
    assert "missing" not in story


def test_at_first_it_is_ten_lines_of_80_columns(bundle: Path, explain: Explain) -> None:
    status, short, _ = explain()
    assert status == 0
    lines = short.splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "asked", "by", "granted", "added",
    ]  # fmt: skip
    assert lines[0].startswith("asked      NVIDIA_VISIBLE_DEVICES=all; capabilities ")
    assert "granted    GPUs 0, 1 (NVIDIA H100)" in lines
    assert f" of driver {VERSION}" in short


def test_empty_files_that_hid_the_driver_are_told_with_a_remedy(
    bundle: Path, explain: Explain
) -> None:
    (bundle / "rootfs/opt").mkdir()
    (bundle / "rootfs/opt/libcuda.so.1").touch()
    (bundle / "rootfs/opt/libnvidia-ml.so.1").touch()
    assert "empty" not in explain()[1]
    write_spec(bundle, "NVIDIA_VISIBLE_DEVICES=all", "LD_LIBRARY_PATH=/opt")
    story = " ".join(explain()[1].split())
    assert "image empty files hide the driver's libraries (/opt/libcuda.so.1 and 1 more)" in story
    assert "not by docker commit" in story


def test_of_a_denial_it_says_who_asked_why_not_and_what_to_do(
    bundle: Path, explain: Explain
) -> None:
    for namespace in ("t" * 250, "team"):
        write_spec(bundle, "NVIDIA_VISIBLE_DEVICES=all", namespace=namespace)
        status, short, _ = explain()
        assert status == 0
        lines = short.splitlines()
        assert len(lines) <= 10
        assert max(map(len, lines)) <= 80
        titles = [line.split()[0] for line in lines if not line.startswith(" ")]
        assert titles[:4] == ["asked", "by", "denied", "do"]
    told = " ".join(line[11:].strip() for line in lines)
    assert "an unprivileged container of a pod in namespace team" in told
    assert "nvshim config set policy.trusted-namespaces team" in told


def of_an_engine(bundle: Path, node: Node, *environment: str) -> None:
    """Return the bundle as an engine leaves it that applies NVIDIA's CDI spec."""
    write_spec(bundle, *environment)
    spec = json.loads((bundle / "config.json").read_text())
    home = "/usr/lib/x86_64-linux-gnu"
    library = f"{home}/libcuda.so.{VERSION}"
    calls = (["update-ldcache", "--folder", home], ["chmod"], ["explode", "now"])
    spec |= {
        "linux": {"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]},
        "mounts": [
            {"source": f"{node.driver}{library}", "destination": library, "options": ["rbind"]},
            {"source": "/srv/data", "destination": "/data", "options": ["rbind"]},
        ],
        "hooks": {
            "createContainer": [
                {"path": "/opt/nvidia-cdi-hook", "args": ["x", *words]} for words in calls
            ]
        },
    }
    (bundle / "config.json").write_text(json.dumps(spec))


def test_who_gave_what_is_told_where_an_engine_has_applied_a_cdi_spec(
    node: Node, bundle: Path, explain: Explain
) -> None:
    of_an_engine(bundle, node, "NVIDIA_VISIBLE_DEVICES=void")
    _, short, _ = explain()
    lines = short.splitlines()
    assert len(lines) <= 10
    told = " ".join(short.split())
    assert "asked no device itself (NVIDIA_VISIBLE_DEVICES=void)" in told
    assert "has GPU 0 (NVIDIA H100)" in told
    assert "from device nodes and 1 file of the driver in its spec, by an engine that" in told
    assert "added 1 link" in told
    assert "granted" not in told
    unknown = "createContainer /opt/nvidia-cdi-hook explode now: the runtime runs it"
    assert unknown in told
    assert "hooks 2 of NVIDIA's hooks in its spec: done in process, not run" in told
    _, long, _ = explain("-v")
    assert "createContainer /opt/nvidia-cdi-hook update-ldcache: done in process, not run" in long
    assert unknown in long
    assert "and 1 file of the driver mounted by its spec" in long


def test_what_an_engine_has_given_already_is_not_said_to_be_ours(
    node: Node, bundle: Path, explain: Explain
) -> None:
    _, alone, _ = explain("-o", "json")
    of_an_engine(bundle, node, "NVIDIA_VISIBLE_DEVICES=all")
    _, document, _ = explain("-o", "json")
    edits, before = (json.loads(each)["record"]["edits"] for each in (document, alone))
    assert [e["path"] for e in edits["devices"]] == [e["path"] for e in before["devices"]]
    _, short, _ = explain()
    told = " ".join(short.split())
    nodes, mounts = len(edits["devices"]) - 1, len(edits["mounts"]) - 1
    assert f"added {nodes} device nodes, {mounts} mount{'' if mounts == 1 else 's'}, " in told
    assert "kept 1 device node, 1 mount already in its spec, by an engine that applies CDI" in told
    _, long, _ = explain("-v")
    assert "1 of the mounts are by an engine that applies CDI or --device:" in long


def test_hook_that_is_not_nvidias_is_named(bundle: Path, explain: Explain) -> None:
    write_spec(bundle)
    spec = json.loads((bundle / "config.json").read_text())
    spec["hooks"] = {"poststop": [{"path": "/opt/clean-up", "args": ["clean-up", "all"]}]}
    (bundle / "config.json").write_text(json.dumps(spec))
    for words in ((), ("-v",)):
        assert "poststop /opt/clean-up all: the runtime runs it" in explain(*words)[1]


def test_what_a_container_cannot_do_without_is_missing(node: Node, bundle: Path) -> None:
    record = {
        "format": 1, "edits": {}, "request": {}, "policy": None,
        "missing": [
            {"what": f"libcuda.so.{VERSION} (x86_64)", "sought": ["/a", "/b"]},
            {"what": "/dev/nvidia1", "sought": ["is no device"]},
            {"what": f"libcuda.so.{VERSION} (i386)", "sought": ["/a"]},
            {"what": "libnvidia-pkcs11.so.1 (x86_64)", "sought": ["/a"]},
        ],
    }  # fmt: skip
    told = [text for title, text in summarize(Explanation(record, "", ())) if title == "missing"]
    assert told == [
        f"libcuda.so.{VERSION} (x86_64): not in /a, /b", "/dev/nvidia1: is no device",
    ]  # fmt: skip


def test_as_json_it_is_the_record_that_the_bundle_would_get(
    node: Node, bundle: Path, config_file: str, explain: Explain
) -> None:
    take_inventory(node.config, told())
    status, text, _ = explain("-o", "json")
    assert status == 0
    document = json.loads(text)
    foreseen = document["record"]
    assert document["container"] is None
    assert document["configuration"] == {"file": config_file, "notes": []}
    spec = json.loads((bundle / "config.json").read_text())
    inventory = engine.load_inventory(node.config)
    verdict = engine.judge(spec, engine.read_request(spec), node.config)
    done = engine.inject(
        spec,
        verdict.allowed,
        inventory,
        engine.RootfsTarget(str(bundle / "rootfs"), str(bundle / "staging")),
        config=node.config,
        verdict=verdict,
    ).record
    for record in (foreseen, done):
        # Parts that only a real injection shows.
        for key in ("milliseconds", "written", "char_links"):
            del record[key]
    assert foreseen == done


def test_a_request_that_the_node_cannot_meet_is_one_line_and_a_status(
    bundle: Path, explain: Explain
) -> None:
    write_spec(bundle, "NVIDIA_VISIBLE_DEVICES=7")
    status, story, errors = explain()
    assert (status, story) == (1, "")
    assert errors.startswith("NVSHIM-E0202 unknown-device: GPU 7")
    assert errors.count("\n") == 1


def test_a_container_that_asks_for_nothing_is_told_so(bundle: Path, explain: Explain) -> None:
    write_spec(bundle, "NVIDIA_VISIBLE_DEVICES=void")
    status, story, _ = explain()
    assert status == 0
    assert story == ("asked      nothing requested (NVIDIA_VISIBLE_DEVICES=void); spec unchanged\n")


def test_denied_container_of_a_pod_is_told_what_and_why(
    bundle: Path, config_file: str, explain: Explain
) -> None:
    write_spec(bundle, "NVIDIA_VISIBLE_DEVICES=all", namespace="team")
    status, story, _ = explain("-v", "--diff")
    assert status == 0
    assert "mode default; requested by an unprivileged container of a pod in team\n" in story
    assert "denied: NVIDIA_VISIBLE_DEVICES=all: no device plugin gave it to" in story
    assert "nvidia0" not in story
    assert story.endswith(f"config     {config_file}\nspec       it is unchanged\n")
    with open(config_file, "a") as file:
        file.write('\n[policy]\ndenied = "fail"\n')
    status, story, errors = explain()
    assert (status, story, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("NVSHIM-E0221 request-denied: NVIDIA_VISIBLE_DEVICES=all")


def test_without_an_image_the_directories_are_said_to_be_a_guess(
    bundle: Path, explain: Explain
) -> None:
    (bundle / "rootfs").rename(bundle / "elsewhere")
    status, story, _ = explain("-v")
    assert status == 0
    assert story.startswith(
        "note       the image is not available, so the libraries' directories are a"
    )
    _, story, _ = explain("--rootfs", str(bundle / "elsewhere"))
    assert "guess" not in story


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"[" * 100_000, b"\xff"])
def test_a_spec_that_cannot_be_read_is_one_line(
    bundle: Path, explain: Explain, content: bytes | None
) -> None:
    spec = bundle / "config.json"
    spec.unlink()
    if content is not None:
        spec.write_bytes(content)
    status, _, errors = explain()
    assert status == 1
    assert errors.startswith("NVSHIM-E0404 spec-unreadable: cannot read the spec ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("named", ["a\ud800b", "a\0b", "", 3, None, "nothing-there"])
def test_a_root_that_is_no_path_is_not_looked_at(named: Any, tmp_path: Path) -> None:
    assert rootfs_of({"root": {"path": named}}, str(tmp_path / "config.json")) is None


def test_what_is_listed_is_explained_before_the_first_container(
    bundle: Path, explain: Explain, tmp_path: Path
) -> None:
    """No inventory is cached then, and only NVML knows MIG devices."""
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("mig")) as node:
        where = ("--config", node.config_path, "--containerd-state", node.dev)
        rows = nvshim("list", *where, "-o", "json").items
        devices = [row for row in rows if row["kind"] == "mig"]
        for device, name in (
            (devices[0], devices[0]["uuid"]),
            (devices[-1], f"{devices[-1]['index']}:{devices[-1]['mig_index']}"),
        ):
            write_spec(bundle, f"NVIDIA_VISIBLE_DEVICES={name}")
            status, answer, errors = explain("-o", "json", config=node.config_path)
            assert status == 0, errors
            (granted,) = json.loads(answer)["record"]["grant"]["mig_devices"]
            assert granted["uuid"] == device["uuid"]
        assert not os.path.exists(f"{node.state}/inventory.json")


def test_manifest_that_is_changed_for_the_container_is_named(
    node: Node, bundle: Path, explain: Explain
) -> None:
    path = "/nix/store/x/lib/libcuda.so.1"
    manifest = node.write(node.driver / "etc/OpenCL/vendors/nvidia.icd", f"{path}\n")
    _, brief, _ = explain()
    assert "changed    paths of the host in manifests of the driver: nvidia.icd\n" in brief
    _, story, _ = explain("-v")
    assert (
        f"/etc/OpenCL/vendors/nvidia.icd, a copy of {manifest} "
        f"(names libcuda.so.1 in place of {path})\n"
    ) in story


def test_a_survey_keeps_nothing_and_uses_what_was_kept(node: Node) -> None:
    assert survey(node.config).nvml_failure == "NVML was not asked"
    assert engine.load_inventory(node.config) is None
    take_inventory(node.config, told())
    assert survey(node.config) == engine.load_inventory(node.config)


def test_a_story_leaves_nothing_of_a_record_out() -> None:
    record: dict[str, Any] = {
        "format": 1,
        "request": {"devices": ["0"], "capabilities": [], "source": "", "imex": [3]},
        "edits": {"charms": [{"what": "a horseshoe"}]},
        "denied": {"why": "policy", "by": ["one", "two"]},
        "left_out": ["/lost"],
        "elsewhere": {"/etc/OpenCL/vendors/nvidia.icd": "/run/ours/nvidia.icd"},
        "driver_layer": [{"destination": "/smi", "source": "/driver/smi", "reason": "program"}],
    }
    story = render(record)
    assert "left out   /lost\nelsewhere  /etc/OpenCL/vendors/nvidia.icd is at /run/ours/" in story
    assert "driver layer /smi from /driver/smi (program), not mounted" in story
    for word in ("imex", "3", "charms", "a horseshoe", "denied", "policy", "one", "two"):
        assert word in story, word


def test_an_image_forges_no_line_and_moves_no_cursor() -> None:
    forged = "AMD_VISIBLE_DEVICES=0\ngrant      GPU 0\x1b[2J\x9b2J\u202e\r"
    record = {
        "request": {"devices": "void", "capabilities": [], "source": forged, "x": [[forged]]},
        "policy": None,
        "else": [forged],
    }
    lines = render(record).split("\n")
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
    assert "\\ngrant" in lines[0]


def test_the_difference_is_told_in_both_forms_and_can_be_left_out(
    bundle: Path, explain: Explain
) -> None:
    _, story, _ = explain("-v", "--diff")
    lines = story.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("spec "))
    assert lines[start] == "spec       process.env"
    assert "             + NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/x86_64-linux-gnu" in lines[start:]
    assert any('"path": "/dev/nvidia0"' in line for line in lines[start:])
    assert not any(line.lstrip().startswith("-") for line in lines[start:])
    _, steps, _ = explain("-v")
    assert len(steps.splitlines()) == start
    _, alone, _ = explain("--diff")
    assert alone.splitlines() == lines[start:]
    _, text, _ = explain("-o", "json")
    told = json.loads(text)["differences"]
    assert {each["kind"] for each in told} == {"added"}
    assert {each["path"] for each in told} >= {
        "process.env", "mounts", "linux.devices", "linux.resources.devices",
    }  # fmt: skip
    _, text, _ = explain("-o", "json", "--no-diff")
    assert json.loads(text)["differences"] is None


# -- of running containers -------------------------------------------------------------------


def container(ident: str, **more: Any) -> Container:
    fields = {
        "namespace": "k8s.io", "bundle": f"/b/{ident}", "pod": None, "name": "", "group": ident,
        "sandbox": False, "pid": 1, **more,
    }  # fmt: skip
    return Container(ident, **fields)


POD = Pod("team", "web")
CONTAINERS = [
    container("aaa1", pod=POD, sandbox=True),
    container("aab2", pod=POD, name="server", group="aaa1"),
    container("bbb3", pod=Pod("team", "db"), name="server", group="xyz", pid=4711),
    container("bbb4", pod=Pod("other", "db"), name="server", group="xyz"),
    container("named", name="friendly"),
    container("na"),
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("aab2", "aab2"),
        ("aab", "aab2"),
        ("web", "aab2"),  # and not its sandbox
        ("web/server", "aab2"),
        ("team/web", "aab2"),
        ("team/web/server", "aab2"),
        ("aaa", "aaa1"),
        ("other/db", "bbb4"),
        ("friendly", "named"),
        ("na", "na"),  # an id, and the prefix of another
        ("k8s.io/na", "na"),
        ("k8s.io/friendly", "named"),
        ("k8s.io/name", "named"),  # a prefix, as lists print long ids
        ("team/web/(sandbox)", "aaa1"),
        ("team/web/aab", "aab2"),  # like the one without a name
        ("web/aab2", "aab2"),
        ("4711", "bbb3"),  # by its pid
    ],
)
def test_a_container_is_found_by_what_people_call_it(name: str, found: str) -> None:
    assert find_container(name, CONTAINERS).id == found


@pytest.mark.parametrize("name", ["", "zzz", "web/none", "server", "team"])
def test_what_is_no_container_is_said_to_be_none(name: str) -> None:
    with pytest.raises(ContainerUnknown, match="6 containers run"):
        find_container(name, CONTAINERS)


def test_what_may_be_several_names_them() -> None:
    with raises(ContainerAmbiguous, match=r"team/db/server \(bbb3 in k8s.io\), other/db"):
        find_container("db/server", CONTAINERS)
    with raises(ContainerAmbiguous, match="and 5 more"):
        find_container("c", [container(f"c{number}") for number in range(10)])


def test_a_record_of_another_version_is_no_traceback(
    make_bundle: Callable[..., str], tmp_path: Path
) -> None:
    make_bundle("odd", record={"format": 9, "request": {"wish": "all"}, "edits": {}})
    found = find_container("odd", find_containers([str(tmp_path / "state")]))
    explanation = explain_container(found, Config())
    assert explanation.to_json()["record"]["format"] == 9
    assert explanation.notes == ("its original spec was not kept",)
    with raises(MalformedSpec, match="format 9"):
        explanation.render()


def test_a_container_that_other_shims_have_made_is_told_so(
    make_bundle: Callable[..., str], tmp_path: Path
) -> None:
    make_bundle("other", spec={"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"], "user": {}}})
    found = find_container("other", find_containers([str(tmp_path / "state")]))
    story = explain_container(found, Config()).render()
    assert "container  other (other in k8s.io)\n           it is not running\n" in story
    assert "our shim did not create it" in story
    assert story.endswith("request    nothing was injected: the spec is unchanged\n")


def test_containers_are_completed_by_id_and_by_pod(
    make_bundle: Callable[..., str], tmp_path: Path
) -> None:
    pod = {
        "io.kubernetes.cri.sandbox-name": "web", "io.kubernetes.cri.sandbox-namespace": "team",
        "io.kubernetes.cri.container-name": "server",
    }  # fmt: skip
    make_bundle("aaa1", annotations=pod)
    make_bundle("bbb2", annotations={**pod, "io.kubernetes.cri.container-type": "sandbox"})
    make_bundle("abc3", namespace="moby")
    make_bundle("ccc4", annotations={"nerdctl/name": "$(reboot)"})

    def offered(begun: str) -> list[str]:
        return complete("explain", "--containerd-state", f"{tmp_path}/state", begun)

    assert offered("a") == ["aaa1", "abc3"]
    assert offered("team/") == ["team/web/server"]
    assert offered("b") == []
    assert offered("$") == []
