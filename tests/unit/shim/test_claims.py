"""Claims in files: which are valid, which are refused, and what dead holders leave."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest

from hooks.config import Config
from hooks.errors import ClaimsUnusable, DeviceHeld
from hooks.requests.prefilter import prefilter
from hooks.requests.request import read_request
from integration.containers.procfs import Procfs
from shim import bundle as bundle_files
from shim import files
from shim.work import claims
from shim.work.provision import Provision
from tests.harness.raising import raises
from tests.harness.waiting import eventually
from tests.unit.hooks.fake_node import Node, nvml_gpu, uuid_of

SPEC: Final[dict[str, Any]] = {
    "process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"], "user": {"uid": 0, "gid": 0}},
    "linux": {},
    "mounts": [],
}


class Place:
    """A node with one GPU, limited to one container, and bundles on it."""

    def __init__(self, node: Node) -> None:
        node.add_kernel()
        node.add_driver()
        node.add_gpu(0)
        self.inventory = node.take_inventory(nvml_gpu(0))
        self.config: Config = replace(node.config, holders="exclusive")
        self.tasks = node.base / "tasks"

    def configure(self, monkeypatch: pytest.MonkeyPatch, limits: str) -> None:
        """Write the configuration that a shim reads."""
        names = ("driver_root", "dev", "proc", "sys", "state")
        said = {name.replace("_", "-"): getattr(self.config, name) for name in names}
        lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in said.items())
        file = self.tasks.parent / "config.toml"
        file.write_text(f"[node]\n{lines}[sharing]\n{limits}\n")
        monkeypatch.setenv("NVSHIM_CONFIG", str(file))

    def bundle(self, name: str) -> str:
        path = self.tasks / "ns" / name
        path.mkdir(parents=True)
        return str(path)

    def claim(self, bundle: str, spec: dict[str, Any] = SPEC, **limits: Any) -> None:
        config = replace(self.config, **limits)
        request = read_request(spec, config)
        claims.claim(bundle, spec, request, self.inventory, config)

    @property
    def directory(self) -> Path:
        return Path(self.config.state) / claims.DIRECTORY

    def files(self) -> list[str]:
        return sorted(name for name in os.listdir(self.directory) if name != "lock")


@pytest.fixture
def place(bare_node: Node) -> Place:
    return Place(bare_node)


def test_the_second_is_refused_until_the_first_gives_back(place: Place) -> None:
    one, two = place.bundle("one"), place.bundle("two")
    place.claim(one)
    with pytest.raises(DeviceHeld) as refused:
        place.claim(two)
    assert "one container may have it, and ns/one has it" in str(refused.value)
    assert not os.path.exists(f"{two}/{bundle_files.CLAIM}")
    bundle_files.release_claim(one)
    assert os.listdir(one) == []
    place.claim(two)
    assert len(place.files()) == 1


def test_as_many_as_may_have_it(place: Place) -> None:
    for name in ("one", "two", "three"):
        place.claim(place.bundle(name), holders_of=("0=3",))
    with pytest.raises(DeviceHeld, match="3 containers may have it"):
        place.claim(place.bundle("four"), holders_of=("0=3",))


def test_the_same_container_may_claim_again(place: Place) -> None:
    one = place.bundle("one")
    place.claim(one)
    place.claim(one)
    assert len(place.files()) == 1


def test_a_bundle_that_is_gone_or_is_another_s_claims_nothing(place: Place) -> None:
    one = place.bundle("one")
    place.claim(one)
    os.unlink(f"{one}/{bundle_files.CLAIM}")
    os.rmdir(one)
    place.bundle("one")  # of a container with the same id and no request
    place.claim(place.bundle("two"))
    assert len(place.files()) == 1


@pytest.fixture
def init() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that keeps running."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


def _wait_unreaped(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_container_whose_init_has_ended_has_nothing(
    place: Place, init: subprocess.Popen[bytes]
) -> None:
    one, two = place.bundle("one"), place.bundle("two")
    place.claim(one)
    Path(one, bundle_files.INIT_PID).write_text(str(init.pid))
    with pytest.raises(DeviceHeld):
        place.claim(two)
    init.kill()
    _wait_unreaped(init.pid)
    # In the pod's or the host's pid namespace, other processes of the container may continue.
    for namespaces in ([], [{"type": "pid", "path": "/proc/1/ns/pid"}]):
        Path(one, "config.json").write_text(json.dumps({"linux": {"namespaces": namespaces}}))
        with pytest.raises(DeviceHeld):
            place.claim(two)
    own = {"linux": {"namespaces": [{"type": "pid"}]}}
    Path(one, "config.json").write_text(json.dumps(own))
    place.claim(two)
    init.wait()
    (place.directory / place.files()[0]).unlink()
    place.claim(two)


_WITHOUT_ITS_FIRST_THREAD: Final = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def headless() -> Iterator[int]:
    """Start a process whose main thread has exited."""
    argv = [sys.executable, "-c", _WITHOUT_ITS_FIRST_THREAD]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        try:
            stat = Path(f"/proc/{process.pid}/stat")
            eventually(lambda: ") Z " in stat.read_text(), "it looks like a zombie")
            yield process.pid
        finally:
            process.kill()


def test_a_container_whose_first_thread_alone_has_ended_goes_on(
    place: Place, headless: int
) -> None:
    one, two = place.bundle("one"), place.bundle("two")
    place.claim(one)
    Path(one, bundle_files.INIT_PID).write_text(str(headless))
    with pytest.raises(DeviceHeld):
        place.claim(two)
    status = Procfs().status(headless)
    assert status
    assert not status.is_zombie


def test_one_that_was_made_without_a_limit_counts(place: Place) -> None:
    one, two = place.bundle("one"), place.bundle("two")
    record = {"grant": {"gpus": [{"uuid": uuid_of(0)}], "capabilities": ["compute"]}}
    Path(one, bundle_files.RECORD).write_text(json.dumps(record))
    with pytest.raises(DeviceHeld, match="ns/one has it"):
        place.claim(two)
    Path(one, bundle_files.RECORD).write_text("damaged")
    place.claim(two)


def test_one_that_has_it_by_its_spec_counts(place: Place) -> None:
    """containerd writes such a spec when the kubelet names CDI devices."""
    one, two = Path(place.bundle("one")), place.bundle("two")
    spec: dict[str, Any] = {"linux": {"devices": [{"path": "/dev/nvidia0", "type": "c"}]}}
    admin = {"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}
    other = {"linux": {"devices": [{"path": "/dev/nvidia1"}, None]}}
    odd = {"linux": {"devices": "/dev/nvidia0"}}
    for passed in ({**spec, **admin}, other, odd):
        (one / "config.json").write_text(json.dumps(passed))
        place.claim(two)
        bundle_files.release_claim(two)
    (one / "config.json").write_text(json.dumps(spec))
    with pytest.raises(DeviceHeld, match="ns/one has it"):
        place.claim(two)
    (one / bundle_files.RECORD).write_text('{"format": 1, "grant": null}')
    with pytest.raises(DeviceHeld, match="ns/one has it"):
        place.claim(two)


LISTED: Final[dict[str, Any]] = {"linux": {"devices": [{"path": "/dev/nvidia0", "type": "c"}]}}


def test_one_that_has_it_by_its_spec_is_refused(place: Place) -> None:
    one, two = place.bundle("one"), place.bundle("two")
    listed = (place.inventory, place.config)
    place.claim(one)
    with pytest.raises(DeviceHeld, match=r"GPU 0 .* for ns/two: .* ns/one has it"):
        claims.claim(two, LISTED, None, *listed)
    admin = {"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}
    passed: dict[str, Any]
    for passed in ({**LISTED, **admin}, {"linux": {"devices": [3]}}, {"linux": {}}):
        claims.claim(two, passed, None, *listed)
    claims.claim(two, LISTED, None, place.inventory, replace(place.config, holders=2))
    bundle_files.release_claim(two)
    bundle_files.release_claim(one)
    claims.claim(two, LISTED, None, *listed)
    with pytest.raises(DeviceHeld, match="ns/two has it"):
        place.claim(one)


@pytest.mark.parametrize(
    ("limits", "refused", "said"),
    [
        ('holders = "exclusive"', True, 0),
        ('holders = "exclusive"\nbeyond = "start"', False, 1),
        ('holders = "any"', False, 0),
        ('holders = "exclusive"\nexempt-namespaces = ["monitoring"]', False, 0),
    ],
)
def test_what_a_spec_lists_is_limited_when_a_container_is_made(
    place: Place, monkeypatch: pytest.MonkeyPatch, limits: str, *, refused: bool, said: int
) -> None:
    """containerd writes it from CDI devices of the kubelet: it has no request for us."""
    place.configure(monkeypatch, limits)
    place.claim(place.bundle("one"))
    log = Mock()
    two = place.bundle("two")
    spec: dict[str, Any] = {
        "annotations": {"io.kubernetes.cri.sandbox-namespace": "monitoring"},
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
        **LISTED,
    }
    Path(two, "config.json").write_text(json.dumps(spec))
    with pytest.raises(DeviceHeld) if refused else nullcontext():
        Provision(two, log, Mock()).provide(prefilter(spec), [], "runc")
    assert log.warning.call_count == said
    assert json.loads(Path(two, "config.json").read_text()) == spec
    bundle_files.release_claim(two)
    assert len(place.files()) == 1


def test_what_a_spec_lists_beside_what_is_asked_for_is_claimed_as_well(place: Place) -> None:
    one, two = place.bundle("one"), place.bundle("two")
    looks: dict[str, Any] = {**SPEC, "process": {**SPEC["process"]}}
    looks["process"]["env"] = ["NVIDIA_VISIBLE_DEVICES=none"]
    place.claim(one, {**looks, **LISTED})
    with pytest.raises(DeviceHeld, match="ns/one has it"):
        place.claim(two)
    # The image's capabilities do not exempt devices that come from another source.
    looks["process"]["env"] += ["NVIDIA_DRIVER_CAPABILITIES=utility"]
    place.claim(one, {**looks, **LISTED}, holders_exempt_utility=True)
    with pytest.raises(DeviceHeld, match="ns/one has it"):
        place.claim(two, holders_exempt_utility=True)
    # Like a container from before the limit was set.
    bundle_files.release_claim(one)
    Path(one, "config.json").write_text(json.dumps({**looks, **LISTED}))
    record = {"grant": {"gpus": [], "mig_devices": [], "capabilities": ["utility"]}}
    Path(one, bundle_files.RECORD).write_text(json.dumps(record))
    with pytest.raises(DeviceHeld, match="ns/one has it"):
        place.claim(two)


def test_a_lock_that_nobody_lets_go_of_is_not_waited_for_for_ever(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.claim(place.bundle("one"), holders=2)
    monkeypatch.setattr(claims, "_LATE", 0.05)
    lock = os.open(place.directory / "lock", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with raises(ClaimsUnusable, match="another process has had lock for"):
        place.claim(place.bundle("two"), holders=2)
    with pytest.raises(BlockingIOError, match="another process has had lock for"):
        claims.remove_dead(str(place.directory), place.files()[0])
    os.close(lock)
    place.claim(place.bundle("three"), holders=2)


def test_a_title_of_any_length_claims(place: Place) -> None:
    annotations = {"io.kubernetes.cri.sandbox-name": "x" * (2 << 20)}
    place.claim(place.bundle("one"), {**SPEC, "annotations": annotations})
    with pytest.raises(DeviceHeld):
        place.claim(place.bundle("two"))


def test_the_exempt_neither_count_nor_are_refused(place: Place) -> None:
    annotations = {"io.kubernetes.cri.sandbox-namespace": "monitoring"}
    monitor = {**SPEC, "annotations": annotations}
    exempt: dict[str, Any] = {"holders_exempt": ("monitoring",)}
    place.claim(place.bundle("monitor"), monitor, **exempt)
    place.claim(place.bundle("one"), **exempt)
    place.claim(place.bundle("another"), monitor, **exempt)
    with pytest.raises(DeviceHeld):
        place.claim(place.bundle("two"), **exempt)


def test_what_is_no_claim_is_removed(place: Place) -> None:
    place.claim(place.bundle("one"))
    names = {"damaged": b"\xff", "empty": b"", "list": b"[]", "half": b'{"title": "x"}'}
    for name, content in names.items():
        (place.directory / name).write_bytes(content)
    (place.directory / ".temporary.17").write_bytes(b"{}")
    with pytest.raises(DeviceHeld):
        place.claim(place.bundle("two"))
    assert len(place.files()) == 1


def test_claims_that_cannot_be_written_refuse(place: Place) -> None:
    place.directory.parent.mkdir(exist_ok=True)
    place.directory.write_text("no directory")
    with raises(ClaimsUnusable, match="NVSHIM-E0229"):
        place.claim(place.bundle("one"))


def _try(place: Place, bundle: str, begin: Any, answers: Any) -> None:
    begin.wait()
    try:
        place.claim(bundle)
    except DeviceHeld:
        answers.put("")
    else:
        answers.put(bundle)


def test_of_many_at_once_one_has_it(place: Place) -> None:
    context = multiprocessing.get_context("fork")
    begin, answers = context.Event(), context.Queue()
    many = [
        context.Process(target=_try, args=(place, place.bundle(f"c{n}"), begin, answers))
        for n in range(12)
    ]
    for process in many:
        process.start()
    begin.set()
    got = [answers.get(timeout=30) for _ in many]
    for process in many:
        process.join()
    assert len([bundle for bundle in got if bundle]) == 1
    assert len(place.files()) == 1


def _die_at(place: Place, bundle: str, write: int) -> None:
    """Kill this process when it writes the nth file."""
    real, times = files.write, 0

    def counted(path: str, content: bytes, *, mode: int = 0o600) -> None:
        nonlocal times
        times += 1
        if times == write:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, content, mode=mode)

    files.write = counted
    place.claim(bundle)
    time.sleep(100)


@pytest.mark.parametrize("write", [1, 2])
def test_who_dies_while_it_claims_neither_has_it_nor_holds_others_up(
    place: Place, write: int
) -> None:
    one = place.bundle("one")
    process = multiprocessing.get_context("fork").Process(target=_die_at, args=(place, one, write))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    place.claim(place.bundle("two"))
    bundle_files.release_claim(one)  # as the delete verb does afterwards
    assert os.listdir(one) == []
    assert len(place.files()) == 1


def test_only_a_dead_claim_is_removed_by_hand(place: Place) -> None:
    one = place.bundle("one")
    place.claim(one)
    (name,) = place.files()
    directory = str(place.directory)
    assert [(n, c.title, holds) for n, c, holds in claims.read_claims(directory) if c] == [
        (name, "ns/one", True)
    ]
    assert not claims.remove_dead(directory, name)
    os.unlink(f"{one}/{bundle_files.CLAIM}")
    assert claims.remove_dead(directory, name)
    assert place.files() == []
