"""The plan of a resource's MPS control daemon, and the programs that use it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import Config
from hooks.errors import DriverNotFound
from hooks.node.driver import Driver, DriverFile, LibraryFile
from hooks.node.gpus import Gpu
from hooks.words import Arch
from integration.agent_errors import (
    MpsDaemonFailed,
    MpsImpossible,
    MpsProgramMissing,
    MpsStateUnusable,
)
from integration.node.mps.claim_daemons import plan_of_claim
from integration.node.mps.paths import Places, places_in
from integration.node.mps.plan import ClaimDaemon, Programs, plan_of
from integration.node.services.mps import compute_modes as modes
from integration.node.services.mps import daemon, host_setup
from integration.node.services.mps.daemon import Daemon
from integration.node.values.resources import MPS, Device, Resource
from shim.causes.agent import is_locked
from tests.harness.fuse import fuse
from tests.harness.raising import raises
from tests.unit.node.inventories import node_with

if TYPE_CHECKING:
    from pathlib import Path

    from hooks.node.inventory import Inventory

GIB: Final = 1 << 30
LOADER: Final = "lib64/ld-linux-x86-64.so.2"


def uuid(number: int) -> str:
    return f"GPU-0000000{number}-0000-0000-0000-000000000000"


def inventory_of(root: str, *gpus: Gpu) -> Inventory:
    bin_, lib = f"{root}/usr/bin", f"{root}/usr/lib/x86_64-linux-gnu"
    names = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
    libcuda = f"{lib}/libcuda.so.550.1"
    driver = Driver(
        version="550.1",
        arch=Arch.X86_64,
        libraries=(LibraryFile("libcuda.so.{v}", "libcuda.so.1", libcuda, Arch.X86_64, None),),
        files=tuple(DriverFile(name, name, f"{bin_}/{name}") for name in names),
        library_directories=(lib,),
        root=root or "/",
    )
    return node_with(*gpus, driver=driver)


def gpu(number: int, **facts: Any) -> Gpu:
    plain = Gpu(index=number, minor=number, uuid=uuid(number), bus_id="0000:01:00.0", model="H100")
    return replace(plain, **facts)


def shared(*numbers: int, replicas: int = 3, memory: int | None = 80 * GIB) -> Resource:
    devices = tuple(
        Device(f"{uuid(n)}::{k}", uuid(n), uuid(n), str(n), n, memory_bytes=memory)
        for n in numbers
        for k in range(replicas)
    )
    return Resource("nvidia.com/gpu", devices, sharing=MPS, replicas=replicas)


def test_each_share_has_an_equal_part_and_devices_their_places() -> None:
    plan = plan_of(shared(2, 0), inventory_of("", gpu(0), gpu(1), gpu(2)))
    assert plan.devices == (uuid(2), uuid(0))
    # A daemon that was started with more devices numbers them differently.
    assert plan.commands((uuid(0), uuid(1), uuid(2))) == (
        "set_default_active_thread_percentage 33",
        "set_default_device_pinned_mem_limit 0 27306M",
        "set_default_device_pinned_mem_limit 2 27306M",
    )
    unknown = plan_of(shared(0, memory=None), inventory_of("", gpu(0)))
    assert unknown.commands(unknown.devices) == ("set_default_active_thread_percentage 33",)


def test_each_gpu_is_divided_by_its_own_number_of_shares() -> None:
    """Entries of the settings may give GPUs of one resource different numbers of replicas."""
    devices = (*shared(0, replicas=2).devices, *shared(1, replicas=8).devices)
    resource = Resource("nvidia.com/gpu", devices, sharing=MPS, replicas=8)
    plan = plan_of(resource, inventory_of("", gpu(0), gpu(1)))
    assert plan.limits == {uuid(0): 40960, uuid(1): 10240}
    assert plan.percentage == 12, "the daemon has one for all GPUs"


@pytest.mark.parametrize("facts", [{"lost": "GPU is lost"}, {"drained": "since noon"}])
def test_a_gpu_that_cannot_be_opened_is_left_to_the_others(facts: dict[str, str]) -> None:
    plan = plan_of(shared(0, 1), inventory_of("", gpu(0, **facts), gpu(1)))
    assert plan.devices == (uuid(1),)
    assert plan.limits.keys() == {uuid(0), uuid(1)}


@pytest.mark.parametrize("facts", [None, {"mig": True}])
def test_what_is_no_whole_gpu_any_more_is_not_shared(facts: dict[str, object] | None) -> None:
    gpus = () if facts is None else (gpu(0, **facts),)
    with raises(MpsImpossible, match="E2736"):
        plan_of(shared(0), inventory_of("", *gpus))


def test_several_users_are_served_by_programs_and_gpus_that_can(tmp_path: Path) -> None:
    root = str(tmp_path)
    volta, pascal = gpu(0, compute_capability="7.0"), gpu(1, compute_capability="6.1")
    one = ClaimDaemon({uuid(0): 0}, 100, multi_user=True)
    program = tmp_path / "usr/bin/nvidia-cuda-mps-control"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"\0-d\0-f\0")  # like branch 550
    with raises(MpsImpossible, match="has no option -multiuser-server"):
        plan_of_claim("claims/one", one, inventory_of(root, volta))
    program.write_bytes(b"\0-d\0-f\0-multiuser-server\0")  # like branch 555
    plan = plan_of_claim("claims/one", one, inventory_of(root, volta))
    assert plan.options == ("-multiuser-server",)
    both = ClaimDaemon({uuid(0): 0, uuid(1): 0}, 100, multi_user=True)
    with raises(MpsImpossible, match=f"{uuid(1)} is H100, older than Volta"):
        plan_of_claim("claims/two", both, inventory_of(root, volta, pascal))
    plain = plan_of_claim("claims/two", replace(both, multi_user=False), inventory_of(root, pascal))
    assert plain.options == ()


def test_the_programs_are_started_as_their_root_is(tmp_path: Path) -> None:
    root = str(tmp_path)
    lib = "/usr/lib/x86_64-linux-gnu"
    bare = plan_of(shared(0), inventory_of(root, gpu(0))).programs
    assert bare == Programs(
        "", f"{root}/usr/bin/nvidia-cuda-mps-control", f"{root}/usr/bin", root + lib
    )
    (tmp_path / LOADER).parent.mkdir()
    (tmp_path / LOADER).write_bytes(b"a loader")
    whole = plan_of(shared(0), inventory_of(root, gpu(0))).programs
    assert whole == Programs(root, "/usr/bin/nvidia-cuda-mps-control", "/usr/bin", lib)
    # The host's own program has its own path.
    hosts = plan_of(shared(0), inventory_of("", gpu(0))).programs
    assert hosts == Programs("", "/usr/bin/nvidia-cuda-mps-control", "/usr/bin", "")


def test_a_driver_without_mps_is_said() -> None:
    there = inventory_of("", gpu(0))
    without = replace(there, driver=replace(there.driver, files=there.driver.files[:1]))
    with pytest.raises(MpsProgramMissing, match="no nvidia-cuda-mps-server among the files"):
        plan_of(shared(0), without)


def program(path: Path, text: str) -> tuple[Daemon, Programs]:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    places = Places(str(path.parent), "nvidia.com/gpu")
    return Daemon(Config(), places), Programs("", str(path), "/usr/bin", "")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("exit 1", "status 1"),
        ("echo 'Cannot find MPS control daemon process' >&2; exit 1", "Cannot find MPS"),
        ("echo 'Unknown command'", "the answer 'Unknown command'"),
        ("exec sleep 100", "no answer within 0.1 s"),
    ],
)
def test_an_answer_that_makes_no_sense_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: str
) -> None:
    if "sleep" in text:
        monkeypatch.setattr(daemon, "TIMEOUT", 0.1)
    asked, programs = program(tmp_path / "control", text)
    with pytest.raises(MpsDaemonFailed, match=found):
        asked.percentage(programs)


def test_clients_are_those_of_every_server(tmp_path: Path) -> None:
    text = (
        'read -r name pid; case "$name $pid" in "get_server_list ") echo 7; echo 8;;'
        ' "get_client_list 7") echo 70; echo 71;; *) echo "Server $pid not found";; esac'
    )
    asked, programs = program(tmp_path / "control", text)
    assert asked.clients(programs) == (70, 71)


@pytest.mark.parametrize(
    ("kept", "found"), [("9G", ""), ("", f"no limit for the memory of {uuid(1)}")]
)
def test_a_limit_that_the_daemon_has_not_taken_is_a_failure(
    tmp_path: Path, kept: str, found: str
) -> None:
    # As the real one, it says nothing about a value that it does not take, and exits with 0.
    text = (
        'read -r name number value; case "$name-$number" in *_percentage*) echo 50.0;;'
        f" get_*_limit-0) echo 9G;; get_*_limit-1) echo {kept};; esac"
    )
    asked, programs = program(tmp_path / "control", text)
    plan = plan_of(shared(0, 1, replicas=2), inventory_of("", gpu(0), gpu(1)))
    plan = replace(plan, programs=programs)
    assert len(plan.limits) == 2
    with pytest.raises(MpsDaemonFailed, match=found) if found else nullcontext():
        asked.configure(plan, plan.devices)


def test_a_daemon_that_has_not_begun_to_run_yet_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((host_setup, "prepare"), (host_setup, "empty_pipe"), (modes, "take")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    monkeypatch.setattr(daemon, "launch_line", lambda *_, **__: ["/bin/sleep", "1000"])
    places = Places(str(tmp_path), "nvidia.com/gpu")
    os.makedirs(places.log)
    plan, starter = plan_of(shared(0), inventory_of("", gpu(0))), Daemon(Config(), places)
    pid = starter.start(plan)
    try:
        # Its starter may be gone now: the next one must find it.
        assert is_locked(places.lock)
        with pytest.raises(MpsDaemonFailed, match="another process holds its lock"):
            starter.start(plan)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not is_locked(places.lock)


def test_a_lock_that_cannot_be_created_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((host_setup, "prepare"), (host_setup, "empty_pipe"), (modes, "take")):
        monkeypatch.setattr(owner, name, lambda *_: None)
    places = Places(str(tmp_path), "nvidia.com/gpu")
    os.makedirs(places.lock)
    with raises(MpsStateUnusable, match=rf"{places.lock}: Is a directory"):
        Daemon(Config(), places).start(plan_of(shared(0), inventory_of("", gpu(0))))


@pytest.fixture
def places(short_path: Path) -> Places:
    return Places(str(short_path / "mps"), "nvidia.com/gpu")


@pytest.fixture
def ground_of(places: Places) -> object:
    yield
    host_setup.remove_shm(places.root)


@pytest.mark.usefixtures("ground_of")
def test_the_ground_is_roots_and_open_to_clients(places: Places, tmp_path: Path) -> None:
    enforce = tmp_path / "sys/fs/selinux/enforce"
    enforce.parent.mkdir(parents=True)
    enforce.write_text("1")
    host_setup.prepare(places, str(tmp_path / "sys"))
    os.chmod(places.pipe, 0o777)  # as a daemon would create it
    host_setup.prepare(places, str(tmp_path / "sys"))
    modes = {p: stat.S_IMODE(os.stat(p).st_mode) for p in (places.root, places.pipe, places.log)}
    assert modes == {places.root: 0o755, places.pipe: 0o755, places.log: 0o700}
    for path in (places.pipe, f"{places.root}/shm"):
        assert b":container_file_t:" in os.getxattr(path, "security.selinux")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounted = [line for line in file if f" {places.root}/shm " in line]
    assert len(mounted) == 1
    assert "nosuid,nodev,noexec" in mounted[0]
    # Files of a dead daemon are removed, and nothing outside of the directory.
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{places.pipe}/control")
    outside = tmp_path / "outside"
    outside.write_text("")
    os.symlink(outside, f"{places.pipe}/log")
    host_setup.empty_pipe(places)
    assert os.listdir(places.pipe) == []
    assert outside.exists()


def test_what_others_may_change_is_refused(places: Places, tmp_path: Path) -> None:
    os.makedirs(places.root)
    os.chown(places.root, 1000, 1000)
    with raises(MpsStateUnusable, match="belongs to user 1000"):
        host_setup.prepare(places, str(tmp_path))
    os.chown(places.root, 0, 0)
    os.makedirs(places.directory)
    os.symlink(tmp_path, places.pipe)
    with raises(MpsStateUnusable, match="pipe"):
        host_setup.prepare(places, str(tmp_path))
    assert not os.path.ismount(f"{places.root}/shm")
    with raises(MpsStateUnusable, match="the limit is 107"):
        host_setup.prepare(replace(places, resource=f"nvidia.com/{'g' * 100}"), str(tmp_path))


def test_what_containers_write_is_no_resource_of_ours(places: Places) -> None:
    os.makedirs(places.directory)
    assert list(places_in(places.root)) == []
    open(places.lock, "w").close()
    os.makedirs(f"{places.root}/shm/evil")
    open(f"{places.root}/shm/evil/.lock", "w").close()
    assert list(places_in(places.root)) == [places]


def test_devices_are_noted_before_they_are_changed_and_until_they_are_given_back(
    places: Places, tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere")
    config = Config(driver_root=nowhere, host_root=nowhere, proc=nowhere, sys=nowhere, dev=nowhere)
    for number in (0, 1):
        with pytest.raises(DriverNotFound):
            modes.take(config, places, (uuid(number),))
    assert modes.taken(places) == (uuid(0), uuid(1))
    modes.give_back(config, places, {uuid(0), uuid(2)})  # without a driver there is no compute mode
    assert modes.taken(places) == (uuid(1),)
    for nonsense in ("", "{}", "[1, 2]", "no JSON"):
        with open(places.devices, "w", encoding="utf-8") as file:
            file.write(nonsense)
        assert modes.taken(places) == ()


def test_shared_memory_that_the_node_would_not_see_is_refused(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from integration.node.services.mps import host_setup\n"
        "from integration.node.mps.paths import Places\n"
        "host_setup.prepare(Places(sys.argv[1], 'nvidia.com/gpu'), '/nonexistent')\n"
    )
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "E2739" in done.stderr
    assert "mountPropagation: Bidirectional" in done.stderr


TOPS: Final = (
    "import json\n"
    "from integration.node.services.mps import host_setup\n"
    "print(json.dumps([*host_setup.cgroup_tops()]))\n"
)


def test_cgroups_are_found_beside_a_mount_that_hangs_and_has_an_odd_name(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TOPS]
    tops = subprocess.check_output(command)
    assert json.loads(tops)
    with fuse(str(tmp_path / "one\rtwo\x0bthree")) as server:
        server.hang()
        assert subprocess.check_output(command) == tops
        assert not server.asked.is_set()


def test_cgroups_are_found_at_a_path_that_the_kernel_escapes(tmp_path: Path) -> None:
    odd = tmp_path / "a b\\c\nd"
    odd.mkdir()
    (top, *_) = host_setup.cgroup_tops()
    script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    command = [
        "unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", top, str(odd),
        sys.executable, "-c", TOPS,
    ]  # fmt: skip
    assert str(odd) in json.loads(subprocess.check_output(command))
