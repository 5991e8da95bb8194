"""Every known advisory of our kind, and the test here that shows why it is none of ours.

The table is by CVE or by an advisory's own name. A row names tests, as FILE::TEST below this
repository's tests, each of which has to exist; or, for what is not ours, says why.

What no test of ours can show: that a runtime below runc 1.3.6, 1.4.3 or crun 1.28 is safe by
itself (CVE-2024-21626, CVE-2025-31133, -52565, -52881, CVE-2026-41579, -47766 and others are
theirs); and that a GPU's kernel driver is.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from api.ttrpc import RemoteError
from hooks.requests.request import read_request
from integration.simulated import Scenario, SimulatedNode
from tests.harness.launcher import REPOSITORY
from tests.harness.shim import shim_by_hand

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

CONTAINERS: Final = "security/test_hostile_containers.py"
IMAGES: Final = "security/test_hostile_images.py"
HERE: Final = "security/test_advisories.py"

LINKS: Final = (
    f"{CONTAINERS}::test_a_link_at_every_directory_leads_nowhere",
    f"{CONTAINERS}::test_links_at_all_places_at_once_lead_nowhere",
    f"{IMAGES}::test_a_link_at_any_place_leads_nowhere_outside",
)
RACES: Final = (
    f"{CONTAINERS}::test_a_volume_that_another_container_changes_leads_nowhere",
    f"{CONTAINERS}::test_a_rootfs_that_another_container_changes_leads_nowhere",
    f"{IMAGES}::test_a_directory_that_becomes_a_link_at_any_moment_leads_nowhere",
    (
        "unit/hooks/image/test_directory_changes.py::"
        "test_what_is_put_in_the_place_of_a_new_thing_is_not_given_away"
    ),
)

COVERED: Final[dict[str, tuple[str, ...]]] = {
    # NVIDIA's container toolkit and libnvidia-container
    "CVE-2024-0132": (*LINKS, *RACES),
    "CVE-2024-0133": (
        *LINKS,
        f"{CONTAINERS}::test_a_file_system_that_takes_no_writes_gets_none",
        f"{IMAGES}::test_the_kernel_is_only_ever_asked_for_single_names_or_by_openat2",
    ),
    "CVE-2024-0134": (
        *LINKS,
        "unit/hooks/image/test_placement.py::test_links_that_are_no_plain_names_are_refused",
    ),
    "CVE-2024-0135": (
        f"{CONTAINERS}::test_programs_of_the_host_cannot_be_overwritten",
        "unit/hooks/edits/test_mutation.py::test_result_with_any_other_change_does_not_leave",
    ),
    "CVE-2024-0136": (
        "unit/hooks/test_config.py::test_mistake_is_named",
        "unit/hooks/edits/test_mutation.py::test_planned_device_of_another_driver_does_not_leave",
    ),
    "CVE-2024-0137": (
        f"{HERE}::test_nothing_is_executed_but_by_the_one_function_for_it",
        f"{CONTAINERS}::test_variables_of_the_image_are_nobody_elses",
    ),
    "CVE-2025-23359": (*LINKS, *RACES),
    "CVE-2025-23266": (f"{CONTAINERS}::test_variables_of_the_image_are_nobody_elses",),
    "CVE-2025-23267": (
        f"{CONTAINERS}::test_files_of_the_loader_of_any_content_harm_nobody",
        f"{CONTAINERS}::test_what_is_no_file_blocks_nothing_and_fills_nothing",
        "fuzz/test_fuzz_corpus.py::test_mutations_of_the_corpus_are_taken_or_refused",
    ),
    "CVE-2026-24260": (
        *RACES,
        (
            "unit/hooks/image/test_only_rootfs_touches_images.py::"
            "test_nothing_is_put_behind_the_path_of_a_rootfs"
        ),
    ),
    "params mount with shared propagation": (
        f"{CONTAINERS}::test_no_mount_reaches_the_host_whatever_its_propagation",
    ),
    "environment of the image as a grant": (
        f"{HERE}::test_volume_that_an_image_declares_is_no_grant",
    ),
    # runc and crun: that we make nothing worse
    "CVE-2019-5736": (f"{CONTAINERS}::test_programs_of_the_host_cannot_be_overwritten",),
    "CVE-2021-30465": RACES,
    "CVE-2024-21626": (
        f"{CONTAINERS}::test_no_descriptor_is_there_to_stand_in",
        f"{CONTAINERS}::test_variables_of_the_image_are_nobody_elses",
        f"{HERE}::test_a_program_has_three_descriptors_whatever_else_is_open",
    ),
    "CVE-2024-45310": RACES,
    "CVE-2025-31133, -52565, -52881": (
        f"{CONTAINERS}::test_a_link_at_every_directory_leads_nowhere",
        "unit/hooks/edits/test_mutation.py::test_planned_mount_outside_the_rules_does_not_leave",
    ),
    "CVE-2026-41579": (f"{CONTAINERS}::test_dev_that_is_a_link_leads_nowhere",),
    "CVE-2026-47766": (f"{CONTAINERS}::test_dev_that_is_a_link_leads_nowhere",),
    # containerd and shims
    "CVE-2020-15257": (
        f"{HERE}::test_a_shim_is_reached_by_root_alone_and_leaves_nothing_open_to_others",
        (
            "unit/ttrpc/test_ttrpc_peers.py::"
            "test_only_our_user_with_our_group_is_served_and_others_get_not_a_byte"
        ),
    ),
    "CVE-2024-25621": (
        f"{HERE}::test_a_shim_is_reached_by_root_alone_and_leaves_nothing_open_to_others",
        "unit/verbs/test_sockets.py::test_the_directory_is_made_for_us_alone",
    ),
    "CVE-2022-23471, -31030, CVE-2025-64329, CVE-2026-53495": (
        "e2e/test_shim_growth.py::test_execs_and_resizes_leave_no_descriptor_task_or_memory",
        "e2e/test_shim_growth.py::test_execs_that_nobody_deletes_keep_no_descriptor",
    ),
    "CVE-2026-53488": (
        "e2e/test_shim_loggers.py::test_only_loggers_that_the_operator_allows_are_started",
    ),
    "CVE-2026-53492": (f"{HERE}::test_nothing_in_a_checkpoint_is_a_request",),
    "CVE-2026-53489, -50195": (
        "unit/shim/test_criu.py::test_checkpoint_with_anything_but_files_in_it_is_refused",
        "unit/shim/test_criu.py::test_parent_elsewhere_is_followed_only_if_it_is_named",
    ),
    "CVE-2026-47262, -46680": (f"{CONTAINERS}::test_a_huge_list_of_users_costs_nothing",),
    "RUN-003": (
        f"{HERE}::test_nothing_is_executed_but_by_the_one_function_for_it",
        (
            "unit/verbs/test_invocation.py::"
            "test_an_unsafe_id_or_namespace_is_refused_before_it_can_be_a_path"
        ),
        f"{HERE}::test_ids_that_are_paths_are_refused",
    ),
}

NOT_OURS: Final = {
    "KDP#1137": "the device plugin imports the toolkit's packages; we import none of them",
    "CVE-2026-24187, -24196, -24199": "memory errors of the kernel driver, behind any ioctl",
    "CVE-2026-30892": "crun exec -u: we give an exec as a file of a process, and no such flag",
    "CVE-2025-47290, CVE-2021-32760, CVE-2024-40635": "containerd's, when it unpacks an image",
    "GHSA-rp3h-jf77-q9p4": "containerd's; fixed with CVE-2026-53495",
}


def test_every_row_names_tests_that_there_are() -> None:
    missing = []
    for row, tests in COVERED.items():
        for test in tests:
            file, _, name = test.partition("::")
            path = os.path.join(REPOSITORY, "tests", file)
            if not os.path.exists(path) or name not in _functions(path):
                missing.append((row, test))
    assert missing == []
    assert not COVERED.keys() & NOT_OURS.keys()


@functools.cache
def _functions(path: str) -> set[str]:
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


# -- programs -------------------------------------------------------------------------------

# What starts programs, or lets a text be one.
STARTS: Final = frozenset({"os.system", "os.popen", "fork_exec", "eval", "exec", "compile"})
STARTS_WITH: Final = (
    "os.exec", "os.spawn", "os.posix_spawn", "pty.", "subprocess.", "asyncio.create_subprocess",
    "anyio.run_process", "anyio.open_process", "pickle.", "marshal.", "runpy.", "shelve.",
)  # fmt: skip
MAY_START: Final = {
    ("shim/spawn.py", "fork_exec"): "every program that the shim starts",
    ("shim/foreground.py", "os.posix_spawn"): "the same for the verbs, which have no loop",
    ("shim/namespaces.py", "os.execve"): "the process that holds a pod's namespaces: our own",
    ("shim/warmstart.py", "os.execv"): "a verb that could not be served warm: our own",
    ("shim/launcher.py", "subprocess.run"): "the compiler, when the shim is installed",
    ("hooks/engine.py", "marshal.dumps"): "the spec as it came, kept in memory",
    ("hooks/engine.py", "marshal.loads"): "the same, to compare with; bytes of nobody else's",
    ("hooks/prepared.py", "marshal.dumps"): "what was decided for an image, as values",
    ("hooks/prepared.py", "marshal.loads"): "the same, of a directory of root's; nothing is called",
}


def test_nothing_is_executed_but_by_the_one_function_for_it() -> None:
    found: set[tuple[str, str]] = set()
    for package in ("hooks", "shim", "api"):
        for directory, _, files in os.walk(os.path.join(REPOSITORY, package)):
            for name in files:
                path = os.path.relpath(os.path.join(directory, name), REPOSITORY)
                if name.endswith(".py"):
                    found |= {(path, call) for call in _starting_calls(path)}
    assert found == MAY_START.keys()


def _starting_calls(path: str) -> set[str]:
    with open(os.path.join(REPOSITORY, path), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    calls = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            assert all(word.arg != "shell" for word in node.keywords), f"{path}:{node.lineno}"
            name = ast.unparse(node.func)
            if name in STARTS or name.startswith(STARTS_WITH):
                calls.add(name)
    return calls


LIST_DESCRIPTORS: Final = """
import os, signal, sys
sys.path[:0] = sys.argv[1:]
import anyio
from shim import spawn
from shim.reaper import Reaper
held = [os.open("/", os.O_RDONLY | os.O_DIRECTORY) for _ in range(1000)]
for fd in held:
    os.set_inheritable(fd, True)
async def reap(reaper, *, task_status):
    with anyio.open_signal_receiver(signal.SIGCHLD) as signals:
        task_status.started()
        async for _ in signals:
            reaper.reap()
async def main():
    async with anyio.create_task_group() as tasks:
        reaper = Reaper()
        await tasks.start(reap, reaper)
        done = await spawn.run(reaper, ["/bin/ls", "/proc/self/fd"])
        print(done.output.decode().split())
        tasks.cancel_scope.cancel()
anyio.run(main)
"""


def test_a_program_has_three_descriptors_whatever_else_is_open() -> None:
    """With a thousand directories open and inheritable: those are how one gets out."""
    argv = [sys.executable, "-c", LIST_DESCRIPTORS, REPOSITORY]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    # The fourth is the directory that ls lists.
    assert done.stdout.strip() == "['0', '1', '2', '3']", done.stderr


# -- grants ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["/var/lib/volumes/1234/_data", "tmpfs", "", "/dev/zero"])
def test_volume_that_an_image_declares_is_no_grant(source: str) -> None:
    """VOLUME /var/run/nvidia-container-devices/all: it is no mount of /dev/null."""
    mount = {
        "destination": "/var/run/nvidia-container-devices/all",
        "type": "bind",
        "source": source,
        "options": ["rbind"],
    }
    spec = {"process": {"env": []}, "mounts": [mount]}
    assert not read_request(spec).wants_injection
    # The control.
    assert read_request({**spec, "mounts": [{**mount, "source": "/dev/null"}]}).wants_injection


# -- the shim's own doors -------------------------------------------------------------------


@pytest.fixture
def launcher(shim_directory: str) -> str:
    return os.path.join(shim_directory, "containerd-shim-nvidia-v1")


CONNECT: Final = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as sock:
    try:
        sock.connect(sys.argv[1])
    except OSError as error:
        sys.exit(error.strerror)
print("connected")
"""


@pytest.mark.anyio
async def test_a_shim_is_reached_by_root_alone_and_leaves_nothing_open_to_others(
    launcher: str,
) -> None:
    async with shim_by_hand(launcher, "c1", "sleep", "1000") as shim:
        await shim.run("c1")
        inodes = set()
        for fd in os.listdir(f"/proc/{shim.pid}/fd"):
            target = os.readlink(f"/proc/{shim.pid}/fd/{fd}")
            inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
        table = await anyio.Path("/proc/net/unix").read_text()
        words = [line.split() for line in table.splitlines()]
        names = [w[7] for w in words if len(w) > 7 and w[6] in inodes]
        assert shim.socket_path in names
        assert not [name for name in names if name.startswith("@")], "an abstract socket"

        socket_mode = os.stat(shim.socket_path).st_mode
        assert stat.S_ISSOCK(socket_mode)
        assert stat.S_IMODE(socket_mode) == 0o600
        assert not os.stat(os.path.dirname(shim.socket_path)).st_mode & 0o077
        argv = [sys.executable, "-I", "-S", "-c", CONNECT, shim.socket_path]
        done = await anyio.run_process([*argv, "65534"], check=False)
        assert done.stderr.strip() == b"Permission denied"
        control = await anyio.run_process([*argv, "0"], check=False)
        assert control.stdout.strip() == b"connected", control.stderr

        bundle = os.path.join(shim.directory, "c1")
        assert not os.stat(bundle).st_mode & 0o077
        # The rootfs and the spec are containerd's, and init.pid is the runtime's.
        for name in set(os.listdir(bundle)) - {"rootfs", "config.json", "init.pid"}:
            seen = os.lstat(os.path.join(bundle, name))
            assert stat.S_ISLNK(seen.st_mode) or not seen.st_mode & 0o077, name
        await shim.end("c1")


@pytest.mark.anyio
async def test_ids_that_are_paths_are_refused(launcher: str) -> None:
    async with shim_by_hand(launcher, "c1", "sleep", "1000") as shim:
        await shim.run("c1")
        before = sorted(os.listdir(shim.directory))
        bundle = os.path.join(shim.directory, "c1")
        for name in ("../c1", "a/b", "/etc", "..", "c1/../c1", "x\0y", "a" * 200):
            with pytest.raises(RemoteError, match=r"NVSHIM-E\d+"):
                await shim.call("Create", id=name, bundle=bundle)
            with pytest.raises(RemoteError, match=r"NVSHIM-E\d+"):
                await shim.exec("c1", name, "true")
        assert sorted(os.listdir(shim.directory)) == before
        await shim.end("c1")


@pytest.mark.anyio
async def test_nothing_in_a_checkpoint_is_a_request(
    launcher: str, tmp_path: Path, workshop: str
) -> None:
    """A checkpoint may bring a spec, annotations and a record along: none of them counts."""
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "inventory.img").write_bytes(bytes.fromhex("16313158"))
    (saved / "descriptors.json").write_text("[]")
    asks: dict[str, Any] = {
        "annotations": {"cdi.k8s.io/gpu": "nvidia.com/gpu=all"},
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]},
        "edits": {"devices": [{"path": "/dev/nvidia0", "major": 195, "minor": 0}]},
    }
    for name in ("config.json", "spec.dump", "config.dump", "nvidia.json"):
        (saved / name).write_text(json.dumps(asks))
    with SimulatedNode.create(f"{workshop}/saved-node", Scenario.load("one")) as node:
        environment = {"NVSHIM_CONFIG": node.config_path}
        async with shim_by_hand(launcher, "c1", "true", environment=environment) as shim:
            before = shim.spec("c1")
            await shim.create("c1", checkpoint=str(saved))
            assert shim.spec("c1") == before
            assert not os.path.exists(os.path.join(shim.directory, "c1", "nvidia.json"))
            await shim.call("Delete", id="c1")
