"""Install real trees with their own program, under containers of a real containerd."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pytest

from hooks.node.cache import RELEASE
from integration.containers import traces
from integration.install.survey import take_survey
from integration.install.usage import Role, users
from integration.install_layout import InstallLayout
from integration.simulated import SimulatedNode
from integration.tree import MANIFEST, Tree
from tests.conftest import LOW_LEVEL, PARTS, RUNTIME
from tests.harness.containerds import containerd_with_images, nothing_left
from tests.harness.runtime import (
    OURS,
    Container,
    Runtime,
    is_alive,
    new_name,
    remove_fifos,
)
from tests.harness.trees import disk_of_its_own, other_version
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd
from tools.dist.manifest import write_tree
from tools.images import busybox
from tools.parts import INSTALLED, Parts

pytestmark = pytest.mark.skipif(
    (RUNTIME, PARTS, LOW_LEVEL) != (OURS, INSTALLED, "runc"), reason="chooses its parts itself"
)

SHIM: Final = "containerd-shim-nvidia-v1"


@pytest.fixture(scope="module")
def old(built_tree: Tree) -> Tree:
    """Return the tree of this checkout."""
    return built_tree


@pytest.fixture(scope="module")
def new(workshop: str, built_tree: Tree) -> Tree:
    """Return a later version of it."""
    return other_version(built_tree.path, f"{workshop}/later-tree", "99.0")


@dataclass(frozen=True, slots=True)
class Host:
    """A prefix to install to, and the arguments for it."""

    layout: InstallLayout

    @property
    def words(self) -> list[str]:
        return ["--prefix", self.layout.prefix, "--bindir", self.layout.bindir]

    def start(self, program: str, *words: str, **options: Any) -> subprocess.Popen[str]:
        argv = [program, *words, *self.words, "-o", "json"]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, **options)

    def nvshim(
        self, *words: str, program: str = "", code: int = 0, **options: Any
    ) -> dict[str, Any]:
        """Run ``nvshim``, by default the installed one; return its answer."""
        with self.start(program or f"{self.layout.bindir}/nvshim", *words, **options) as process:
            said, complained = process.communicate(timeout=200)
        assert process.returncode == code, complained or said
        document: dict[str, Any] = json.loads(said or complained)
        return document

    def install(self, tree: Tree, *words: str, **options: Any) -> dict[str, Any]:
        return self.nvshim("install", *words, program=f"{tree.path}/bin/nvshim", **options)

    def version_row(self, tree: Tree) -> dict[str, Any]:
        rows = self.nvshim("status")["versions"]
        (row,) = (row for row in rows if row["digest"] == tree.digest)
        assert isinstance(row, dict)
        return row

    def in_effect(self) -> str:
        return take_survey(self.layout).current

    def processes_of(self, tree: Tree, role: Role) -> set[int]:
        found = users([self.layout.path(tree.name)])
        return {user.pid for user in found if user.role is role}

    def shims_of(self, tree: Tree) -> set[int]:
        return self.processes_of(tree, Role.SHIM)


@pytest.fixture
def host(tmp_path: str) -> Iterator[Host]:
    with disk_of_its_own(f"{tmp_path}/disk") as disk:
        host = Host(InstallLayout(f"{disk}/opt", f"{disk}/bin"))
        yield host
        trees = [host.layout.path(each.name) for each in take_survey(host.layout).installed]
        for user in users(trees):  # left by a test that has failed
            with suppress(ProcessLookupError):
                os.kill(user.pid, signal.SIGKILL)
    _no_self_test_is_left()


def _self_tests() -> list[str]:
    """Return what self-tests have left on the machine."""
    places = [traces.RUNTIME_STATE, "/run", *traces.cgroup_hierarchies()]
    found = [f"{p}/{n}" for p in places for n in os.listdir(p) if n.startswith("nvshim-self-test")]
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            if b"nvshim-self-test-" in file.read():
                found.append(f"process {name}")
    return found


def _no_self_test_is_left() -> None:
    """Fail if a self-test has left something; wait for the self-tests of other runs."""
    seen = set(_self_tests())
    eventually(lambda: seen.isdisjoint(_self_tests()), f"the end of {seen}")


@pytest.fixture
def containerd(host: Host, shim_config: str) -> Iterator[PrivateContainerd]:
    """Return a containerd that finds the shim where it is installed."""
    with (
        containerd_with_images(
            Parts.installed(),
            [busybox()],
            shim_directory=host.layout.bindir,
            shim_config=shim_config,
        ) as containerd,
        nothing_left(containerd),
    ):
        yield containerd


@pytest.fixture
def runtime(containerd: PrivateContainerd) -> Iterator[Runtime]:
    runtime = Runtime(containerd, RUNTIME)
    yield runtime
    if not containerd.pid:
        containerd.start()
    runtime.close()
    remove_fifos(containerd)


def _works(container: Container) -> bool:
    done = container.exec("echo", "here")
    return (container.status, done.stdout, done.code) == ("RUNNING", "here\n", 0)


def _restart(containerd: PrivateContainerd) -> None:
    containerd.stop()
    containerd.start()


def test_running_containers_live_through_upgrade_rollback_and_uninstallation(
    host: Host, old: Tree, new: Tree, runtime: Runtime
) -> None:
    containerd = runtime.containerd
    answer = host.install(old)
    assert (answer["current"], answer["tested"]) == (old.name, True)
    first = runtime.start_idle()
    assert host.shims_of(old) == set(containerd.shim_pids())
    eventually(lambda: host.processes_of(old, Role.FORK_SERVER), "a fork server is there")

    answer = host.install(new)
    assert (answer["current"], answer["previous"]) == (new.name, old.name)
    row = host.version_row(old)
    assert (row["role"], row["shims"], row["fork_servers"]) == ("previous", 1, 0)
    assert _works(first)
    second = runtime.start_idle()
    assert len(host.shims_of(new)) == 1
    assert host.nvshim("install", "--collect", "--keep", "0")["collected"] == []
    _restart(containerd)
    assert _works(first)
    assert _works(second)

    # The current version's program cleans up after a shim of any version.
    (killed,) = host.shims_of(old)
    init = first.pid
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: not is_alive(init), "its container was cleaned up")
    eventually(lambda: first.status in {"", "STOPPED"}, "containerd knows")

    assert host.nvshim("install", "--rollback")["current"] == old.name
    third = runtime.start_idle()
    assert len(host.shims_of(old)) == 1
    assert _works(second)

    answer = host.nvshim("uninstall", code=3)
    assert (answer["complete"], len(answer["shims"])) == (False, 2)
    assert answer["needed_by_containerd"] == [f"{host.layout.bindir}/{SHIM}"]
    assert not os.path.lexists(host.layout.path("previous"))
    # Without the program, containerd would delete the containers' bundles.
    _restart(containerd)
    for container in (second, third):
        assert _works(container)
        container.kill()
        assert container.exit_code() == 128 + signal.SIGKILL
    eventually(lambda: not containerd.shim_pids(), "the shims have exited")
    assert host.nvshim("uninstall", "-o", "json")["complete"] is True
    assert not os.path.exists(host.layout.prefix)
    assert os.listdir(host.layout.bindir) == []


def _broken(tree: Tree, path: str) -> Tree:
    """Return a version whose shims cannot start."""
    other_version(tree.path, path, "99.1")
    os.unlink(f"{path}/{MANIFEST}")
    (compiled,) = glob.glob(f"{path}/lib/shim/pod/__pycache__/server.*.pyc")
    os.unlink(compiled)
    os.unlink(f"{path}/lib/shim/pod/server.py")
    with open(f"{path}/lib/shim/pod/server.py", "w") as file:
        file.write("raise RuntimeError('no such luck')\n")
    return write_tree(path, version="99.1", revision="", architecture="amd64", python="3.11.2")


def _of_next_release(tree: Tree, path: str) -> Tree:
    """Return a version whose shims do not use an inventory of the tree's."""
    other_version(tree.path, path, "99.2")
    os.unlink(f"{path}/{MANIFEST}")
    module = f"{path}/lib/hooks/node/cache"
    (compiled,) = glob.glob(f"{path}/lib/hooks/node/__pycache__/cache.*.pyc")
    with open(f"{module}.py", encoding="utf-8") as file:
        text = file.read()
    for name in (compiled, f"{module}.py"):
        os.unlink(name)
    with open(f"{module}.py", "w", encoding="utf-8") as file:
        file.write(text.replace(f'"{RELEASE}"', '"99.2"'))
    return write_tree(path, version="99.2", revision="", architecture="amd64", python="3.11.2")


def test_shims_of_two_releases_give_gpus_and_neither_uses_what_the_other_has_found(
    host: Host, old: Tree, workshop: str, runtime: Runtime,
    own_gpus: SimulatedNode, configure: Callable[..., None],
) -> None:  # fmt: skip
    def found_by() -> str:
        with open(f"{own_gpus.state}/inventory.json", encoding="utf-8") as file:
            return str(json.load(file)["release"])

    configure(node=own_gpus)
    gpu = ("--env", "NVIDIA_VISIBLE_DEVICES=1")
    pod = ("--annotation", f"io.containerd.runc.v2.group={new_name('pod')}", *gpu)
    host.install(old, "--no-self-test")
    first = runtime.start_idle(flags=pod)
    new = _of_next_release(old, f"{workshop}/next")
    host.nvshim("install", "--from", new.path, "--no-self-test")
    for flags, release in ((gpu, "99.2"), (pod, RELEASE), (gpu, "99.2")):
        container = runtime.start_idle(flags=flags)
        assert container.exec("sh", "-c", "echo /dev/nvidia[0-9]*").stdout == "/dev/nvidia1\n"
        assert found_by() == release
    assert (len(host.shims_of(old)), len(host.shims_of(new))) == (1, 2)
    assert _works(first)


def test_a_version_that_starts_no_container_is_not_switched_to(
    host: Host, old: Tree, workshop: str
) -> None:
    host.install(old, "--no-self-test")
    broken = _broken(old, f"{workshop}/broken")
    answer = host.nvshim("install", "--from", broken.path, code=1)
    assert answer["error"]["code"] == "NVSHIM-E2630"
    assert sorted(os.listdir(host.layout.prefix)) == [old.name, "bindir", "current"]
    assert host.nvshim("status", "--verify")["problems"] == []


def test_an_installer_that_is_killed_in_its_self_test_is_cleaned_up_after_by_the_next_one(
    host: Host, old: Tree, new: Tree, tmp_path: str
) -> None:
    host.install(old, "--no-self-test")
    waiting = f"{tmp_path}/runc"
    with open(waiting, "w") as file:
        file.write(
            f'#!/bin/sh\necho $$ >>{tmp_path}/started\nrunc "$@"\nwhile sleep 0.1; do :; done\n'
        )
    os.chmod(waiting, 0o755)
    program = f"{new.path}/bin/nvshim"
    with host.start(program, "install", "--runtime", waiting) as process:
        eventually(lambda: os.path.exists(f"{tmp_path}/started"), "the runtime was called")
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    _no_self_test_is_left()
    assert sorted(os.listdir(host.layout.prefix)) == [old.name, "bindir", "current"]
    os.unlink(f"{tmp_path}/started")
    with host.start(program, "install", "--runtime", waiting) as process:
        eventually(lambda: os.path.exists(f"{tmp_path}/started"), "the runtime was called")
        # A second installer does not disturb the first one.
        answer = host.install(new, code=1)
        assert answer["error"]["code"] == "NVSHIM-E2629"
        process.kill()
    assert host.in_effect() == old.name
    assert _self_tests() != []
    assert host.nvshim("status", code=3)["problems"] != []
    assert host.install(new)["current"] == new.name
    _no_self_test_is_left()
    left = {old.name, new.name, "bindir", "current", "previous"}
    assert set(os.listdir(host.layout.prefix)) == left
