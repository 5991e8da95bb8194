"""The self-contained tree runs from any directory; the archive and the package install it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from integration.compat import COMPATIBLE_WITH
from integration.simulated import SimulatedNode
from integration.tree import Tree, verify
from tests.conftest import LOW_LEVEL, PARTS, RUNTIME
from tests.harness.bare_root import BareRoot, bare_root
from tests.harness.containerds import containerd_with_images, nothing_left
from tests.harness.dist import CACHE, copied, inputs
from tests.harness.launcher import REPOSITORY
from tests.harness.node import socket_of_server, words_of
from tests.harness.runtime import OURS, Runtime, is_alive
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd
from tools.dist.archive import archive_name, write_tarball
from tools.dist.debian import package_name, write_package
from tools.dist.interpreter import elf_files, needed
from tools.images import GLIBC, busybox, glibc
from tools.parts import INSTALLED, Parts

pytestmark = pytest.mark.skipif(
    (RUNTIME, PARTS, LOW_LEVEL) != (OURS, INSTALLED, "runc"),
    reason="is about what the shim is run by",
)

SHIM: Final = "containerd-shim-nvidia-v1"

# Imports every module with the tree's interpreter, then prints the mapped files.
IMPORT_ALL: Final = """
import importlib, pkgutil, sys
tree = sys.executable.removesuffix("/runtime/bin/python3")
sys.path += [f"{tree}/lib", f"{tree}/lib-node"]
done = 0
for top in ("api", "hooks", "shim", "integration"):
    package = importlib.import_module(top)
    for module in pkgutil.walk_packages(package.__path__, f"{top}."):
        if not module.name.endswith(("__main__", "nvml_probe", "gpu.entry")):
            importlib.import_module(module.name)
            done += 1
from shim import resident
resident.load()
import anyio, bcrypt, click, google.protobuf, grpc, prometheus_client, pynvml, rich.syntax
import structlog, yaml
import asyncio, ctypes, hashlib, json, ssl, subprocess, tarfile, tomllib
from google._upb import _message
assert yaml.__with_libyaml__
import rich.console
rich.console.Console().print(rich.syntax.Syntax("-a\\n+b", "diff"))
ssl.create_default_context()
elsewhere = {m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
assert all(path.startswith(tree) for path in elsewhere if path != sys.argv[0])
mapped = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
assert all(path.startswith(tree) for path in mapped), mapped
print("imported", done)
"""

# Prints the private memory of a forked process after it has visited every object of its parent:
# once before the objects are immortal, and once after.
FORK_AND_LOOK: Final = """
import os, sys
sys.path.append(sys.executable.removesuffix("/runtime/bin/python3") + "/lib")
from shim.forkserver.memory import make_immortal
objects = [[] for _ in range(100_000)]
def copied():
    reading, writing = os.pipe()
    if os.fork() == 0:
        for each in objects:
            pass
        with open("/proc/self/smaps_rollup") as file:
            dirty = next(line.split()[1] for line in file if line.startswith("Private_Dirty"))
        os.write(writing, dirty.encode())
        os._exit(0)
    os.wait()
    return int(os.read(reading, 20))
before = copied()
make_immortal()
print(before, copied())
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[BareRoot]:
    (tmp_path / "root").mkdir()
    with bare_root(str(tmp_path / "root")) as root:
        yield root


def test_it_runs_where_there_is_nothing_else_and_anywhere(built_tree: Tree, root: BareRoot) -> None:
    place = "/opt/with a space/and-a-name-that-is-long-" + "x" * 120
    copied(built_tree, root.path + place)
    # Files for the system's own libc do not affect ours.
    with open(f"{root.path}/etc/ld.so.preload", "w", encoding="ascii") as file:
        file.write("/lib/no-such-library.so\n")
    said = root.run(f"{place}/bin/{SHIM}", "-v")
    assert (said.returncode, said.stderr) == (0, "")
    assert f"({place}/runtime/bin/python3)" in said.stdout
    said = root.run(f"{place}/bin/nvshim", "--version")
    assert (said.stdout, said.stderr) == (f"nvshim {built_tree.version}\n", "")
    with open(f"{root.path}/tmp/all.py", "w", encoding="utf-8") as file:
        file.write(IMPORT_ALL)
    said = root.run(f"{place}/runtime/bin/python3", "-IS", "/tmp/all.py")
    assert said.returncode == 0, said.stderr
    assert int(said.stdout.rpartition("imported ")[2]) > 200
    verify(root.path + place)  # nothing was written into it


def test_a_shim_copies_no_page_to_count_references(built_tree: Tree) -> None:
    program = f"{built_tree.path}/runtime/bin/python3"
    said = subprocess.run(
        [program, "-ISc", FORK_AND_LOOK], capture_output=True, text=True, check=True
    )
    before, after = map(int, said.stdout.split())  # KiB
    assert before > 5000
    assert after < before / 3


def test_by_a_link_it_is_found_and_acts_under_the_names_of_links(
    built_tree: Tree, root: BareRoot
) -> None:
    os.rmdir(f"{root.path}/opt")
    copied(built_tree, f"{root.path}/opt")
    os.symlink("opt", f"{root.path}/current")
    for name in ("nvshim", "nvidia-ctk"):
        os.symlink("/current/bin/nvshim", f"{root.path}/bin/{name}")
    by = "PYTHONPATH=/tmp PYTHONHOME=/nowhere LD_LIBRARY_PATH=/tmp"
    # As containerd may set it; containerd takes the output of "start" as its answer.
    by += " LD_PRELOAD=/lib/no-such-library.so LD_AUDIT=/lib/no-such-library.so"
    said = root.run("/bin/sh", "-c", f"{by} nvshim --version")
    assert (said.stdout, said.stderr) == (f"nvshim {built_tree.version}\n", "")
    said = root.run("/bin/sh", "-c", f"{by} nvidia-ctk --version")
    assert COMPATIBLE_WITH in said.stdout
    said = root.run("/bin/sh", "-c", f"{by} /current/bin/{SHIM} -v")
    assert (said.returncode, said.stderr) == (0, "")
    # The program alone, as users copy it to have a runtime with another name.
    os.symlink(f"/current/bin/{SHIM}", f"{root.path}/bin/{SHIM}")
    copied_alone = f"{root.path}/tmp/containerd-shim-other-v1"
    shutil.copy(f"{root.path}/opt/bin/{SHIM}", copied_alone)
    assert root.run("/bin/sh", "-c", f"{by} /tmp/containerd-shim-other-v1 -v").stdout == said.stdout


def test_a_place_that_the_loader_would_misread_is_refused(built_tree: Tree, tmp_path: Path) -> None:
    tree = copied(built_tree, str(tmp_path / "a:b"))
    done = subprocess.run(
        [f"{tree.path}/bin/{SHIM}", "-v"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"{SHIM}: {tree.path}: none of : ; $ may be in its path; put it elsewhere"
    )


def test_every_library_that_it_needs_is_in_it(built_tree: Tree) -> None:
    have = set(os.listdir(os.path.join(built_tree.path, "runtime", "lib")))
    assert needed(elf_files(built_tree.path)) <= have


def test_it_has_no_path_of_the_machine_that_it_was_built_on(built_tree: Tree) -> None:
    ours = {os.path.realpath(path) for path in (REPOSITORY, CACHE, built_tree.path, sys.prefix)}
    # Debian's own packages were built in directories like these.
    forbidden = re.compile(b"|".join(re.escape(os.fsencode(path)) for path in {REPOSITORY, *ours}))
    found = []
    for name, value in built_tree.files.items():
        if value.startswith("sha256:"):
            with open(os.path.join(built_tree.path, name), "rb") as file:
                if forbidden.search(file.read()):
                    found.append(name)
    assert found == []


def test_it_has_no_tool_and_what_the_shim_does_not_import_is_kept_from_it(built_tree: Tree) -> None:
    library = set(os.listdir(os.path.join(built_tree.path, "lib")))
    node = set(os.listdir(os.path.join(built_tree.path, "lib-node")))
    assert {"api", "hooks", "shim", "integration", "anyio", "google", "structlog"} <= library
    assert {"bcrypt", "click", "grpc", "prometheus_client", "rich"} <= node
    assert not library & node
    assert "tests" not in library
    cri = os.listdir(os.path.join(built_tree.path, "lib", "integration", "cri"))
    assert {*cri} - {"__pycache__"} == {"__init__.py", "client.py", "engine.py", "errors.py"}


def test_its_archive_says_nothing_of_when_and_by_whom_it_was_made(
    built_tree: Tree, tmp_path: Path
) -> None:
    """tests/release checks that two builds are identical, byte for byte."""
    path = str(tmp_path / "tree.tar.gz")
    write_tarball(built_tree, path, level=0)
    assert archive_name(built_tree) == (
        f"containerd-shim-nvidia-{built_tree.version}-linux-{built_tree.architecture}.tar.gz"
    )
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    top = f"containerd-shim-nvidia-{built_tree.version}"
    assert {member.name.partition("/")[0] for member in members} == {top}
    assert {(m.uid, m.gid, m.uname, m.mtime) for m in members} == {(0, 0, "root", 1_700_000_000)}


def test_where_there_is_no_room_nothing_is_left(tmp_path: Path) -> None:
    script = (
        'mount -t tmpfs -o size=10m tmpfs "$0" && "$@" "$0"; status=$?; ls -A "$0"; exit $status'
    )
    argv = ["unshare", "--mount", "sh", "-c", script, str(tmp_path)]
    done = subprocess.run(
        [*argv, sys.executable, "-m", "tools.dist", "--tree-only"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("dist: NVSHIM-E2603 tree-not-built: ")
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- the package -----------------------------------------------------------------------------

# Imports a new module when its standard input closes.
_LATECOMER: Final = """
import sys
print("ready", flush=True)
sys.stdin.read()
sys.path.append(sys.executable.removesuffix("/runtime/bin/python3") + "/lib")
import decimal, shim.pod.server
print(shim.pod.server.__file__, decimal.__file__)
"""


@pytest.fixture(scope="module")
def packages(built_tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return two packages of one version, the second of a later commit."""
    directory = tmp_path_factory.mktemp("packages")
    newer = copied(built_tree, str(directory / "newer"), revision="later")
    paths = []
    for tree, epoch in ((built_tree, 1_700_000_000), (newer, 1_700_000_060)):
        made_of = replace(inputs(), revision=tree.revision, epoch=epoch)
        paths.append(str(directory / package_name(made_of)))
        write_package(tree, made_of, paths[-1], compression="-Znone")
    return paths


def _dpkg(root: BareRoot, *argv: str) -> str:
    # Install all files: the machine's dpkg may be set to leave out manuals.
    options = ("--force-unsafe-io", "--force-bad-path", "--path-include=*")
    done = root.run("dpkg", f"--root={root.inside}", *options, *argv, host=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def debian(root: BareRoot) -> BareRoot:
    """Return a root directory in which dpkg can install packages."""
    os.makedirs(f"{root.path}/var/lib/dpkg/info")
    os.makedirs(f"{root.path}/var/lib/dpkg/updates")
    for name in ("status", "available"):
        with open(f"{root.path}/var/lib/dpkg/{name}", "w", encoding="ascii"):
            pass
    return root


def test_the_package_installs_upgrades_and_goes_and_never_under_a_running_program(
    packages: list[str], debian: BareRoot
) -> None:
    root = debian
    prefix = f"{root.path}/opt/containerd-shim-nvidia"

    _dpkg(root, "-i", packages[0])
    first = os.readlink(f"{prefix}/current")
    said = root.run("/bin/sh", "-c", f"{SHIM} -v; nvshim --version")
    assert "Revision: tested" in said.stdout
    assert _dpkg(root, "--verify") == ""
    said = root.run("/bin/sh", "-c", "nvshim status && nvshim install --dry-run")
    assert said.returncode == 0, said.stdout

    program = ["/opt/containerd-shim-nvidia/current/runtime/bin/python3", "-ISc", _LATECOMER]
    with root.spawn(*program) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        _dpkg(root, "-i", packages[1])
        second = os.readlink(f"{prefix}/current")
        assert second != first
        said = root.run("/bin/sh", "-c", f"{SHIM} -v")
        assert "Revision: later" in said.stdout
        _dpkg(root, "-r", "containerd-shim-nvidia")
        assert not os.path.exists(f"{root.path}/usr/lib/containerd-shim-nvidia")
        out, _ = running.communicate("")
    assert (running.returncode, out.count(first)) == (0, 2)
    _dpkg(root, "--purge", "containerd-shim-nvidia")
    assert os.listdir(f"{root.path}/usr/bin") == []
    assert not os.path.exists(prefix)


# Records its arguments, and whether the agent's unit exists; stops the agent.
_SYSTEMCTL: Final = """\
#!/bin/sh
[ -e /lib/systemd/system/nvshim-node.service ] && unit=there || unit=gone
echo "$unit $*" >>/tmp/asked
case "$1" in
  stop)
    kill "$(cat /tmp/agent)"
    # Like the real one, it returns when the unit is stopped.
    while busybox readlink "/proc/$(cat /tmp/agent)/exe" >/dev/null; do busybox sleep 0.01; done
    [ ! -e /tmp/trouble ] || busybox chown 1000 /opt
    ;;
  daemon-reload) busybox chown 0 /opt ;;
  is-enabled) [ "$3" = nvshim-node.service ] ;;
esac
"""


def _put_systemctl(root: BareRoot) -> None:
    os.makedirs(f"{root.path}/run/systemd/system")
    with open(f"{root.path}/bin/systemctl", "w", encoding="ascii") as file:
        file.write(_SYSTEMCTL)
    os.chmod(f"{root.path}/bin/systemctl", 0o755)


def _asked(root: BareRoot) -> list[str]:
    """Return the calls of systemctl since the last time."""
    path = f"{root.path}/tmp/asked"
    with open(path, encoding="ascii") as file:
        lines = file.read().splitlines()
    os.unlink(path)
    return lines


def test_systemd_is_told_of_the_package_s_units_and_has_none_of_them_afterwards(
    packages: list[str], debian: BareRoot
) -> None:
    root = debian
    prefix = f"{root.path}/opt/containerd-shim-nvidia"
    _put_systemctl(root)
    for package in packages:  # the second is an upgrade
        _dpkg(root, "-i", package)
        assert _asked(root) == ["there daemon-reload"]
    # A failed removal restarts what it has stopped.
    trouble = f"{root.path}/tmp/trouble"
    with open(trouble, "w", encoding="ascii"):
        pass
    with pytest.raises(AssertionError, match="NVSHIM-E2624"):
        _dpkg(root, "-r", "containerd-shim-nvidia")
    os.unlink(trouble)
    asked = [line for line in _asked(root) if " is-enabled " not in line]
    assert asked[0].startswith("there stop ")
    assert asked[1:] == ["there daemon-reload", "there start nvshim-node.service"]
    assert root.run(SHIM, "-v").returncode == 0
    units = os.listdir(f"{root.path}/lib/systemd/system")
    assert "nvshim-node.service" in units
    # As the agent's unit would run it.
    program = ["/opt/containerd-shim-nvidia/current/runtime/bin/python3", "-ISc", _LATECOMER]
    with root.spawn(*program) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        with open(f"{root.path}/tmp/agent", "w", encoding="ascii") as file:
            file.write(str(agent.pid))
        _dpkg(root, "-r", "containerd-shim-nvidia")
        assert agent.wait(60) == -signal.SIGTERM
    stop, disable, reload = _asked(root)
    assert stop.startswith("there stop ")
    assert disable.startswith("there --quiet disable ")
    assert {*stop.split()[2:]} == {*disable.split()[3:]} == {*units}
    assert reload == "gone daemon-reload"
    # The tree that it ran from could be removed, because it was stopped before.
    assert not os.path.exists(prefix)


def test_a_package_that_an_engine_relies_on_leaves_what_that_names(
    packages: list[str], debian: BareRoot
) -> None:
    root = debian
    config = f"{root.path}/etc/containerd/config.toml"
    os.makedirs(os.path.dirname(config))
    _dpkg(root, "-i", packages[0])
    with open(config, "w", encoding="ascii") as file:
        file.write('runtime_type = "io.containerd.nvidia.v1"\n')
    for word in ("-r", "--purge"):
        said = _dpkg(root, word, "containerd-shim-nvidia")
        assert "First run nvshim configure containerd --remove" in said
        assert root.run(SHIM, "-v").returncode == 0
    os.unlink(config)
    assert root.run("nvshim", "uninstall", "--bindir", "/usr/bin").returncode == 0
    assert os.listdir(f"{root.path}/usr/bin") == []
    assert not os.path.exists(f"{root.path}/opt/containerd-shim-nvidia")


# -- containers ----------------------------------------------------------------------------


@pytest.fixture
def current(built_tree: Tree, tmp_path: Path) -> str:
    """Return a directory with two trees of one version, and a link to the first, as installed."""
    copied(built_tree, str(tmp_path / "one"))
    copied(built_tree, str(tmp_path / "two"), revision="another")
    (tmp_path / "current").symlink_to("one")
    return str(tmp_path / "current")


@pytest.fixture
def containerd(current: str, parts: Parts, two_gpus: SimulatedNode) -> Iterator[PrivateContainerd]:
    with (
        containerd_with_images(
            parts,
            [busybox(), glibc()],
            shim_directory=f"{current}/bin",
            shim_config=two_gpus.config_path,
        ) as containerd,
        nothing_left(containerd),
    ):
        yield containerd


@pytest.fixture
def runtime(containerd: PrivateContainerd) -> Iterator[Runtime]:
    runtime = Runtime(containerd, OURS)
    yield runtime
    runtime.close()


def _tree_of(pid: int) -> str:
    """Return the name of the tree whose interpreter a process runs."""
    path, found, _ = os.readlink(f"/proc/{pid}/exe").partition("/runtime/lib/ld-linux")
    assert found
    return os.path.basename(path)


def _stat(pid: int) -> list[str]:
    """Return ``stat`` of proc(5) from field 3 on; empty for a process that has exited."""
    gone = suppress(FileNotFoundError, ProcessLookupError)
    with gone, open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()
    return []


def _arguments(pid: int) -> str:
    return _stat(pid)[45]


def _fork_servers(containerd: PrivateContainerd) -> dict[str, int]:
    """Return the listening fork servers of a containerd, by the tree of each."""
    found: list[tuple[int, int, str]] = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        words = words_of(pid)
        is_ours = containerd.address in words and "-spare" not in words
        if words[-1:] == ["fork-server"] and is_ours and socket_of_server(pid):
            with suppress(FileNotFoundError):
                if stat := _stat(pid):
                    found.append((int(stat[19]), pid, _tree_of(pid)))
    # A fork of it has its socket and command line for a moment, and is younger.
    return {tree: pid for _, pid, tree in sorted(found, reverse=True)}


def _gpus(runtime: Runtime) -> list[str]:
    flags = ("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=all")
    done = runtime.run("nvidia-smi", "-L", image=GLIBC, flags=flags)
    assert done.code == 0, done.stderr
    return done.lines


def test_containers_with_gpus_run_cold_and_warm_and_across_an_upgrade(
    runtime: Runtime, containerd: PrivateContainerd, current: str
) -> None:
    assert len(_gpus(runtime)) == 2
    first = eventually(lambda: _fork_servers(containerd).get("one", 0), "a fork server")
    assert len(_gpus(runtime)) == 2
    old = runtime.start_idle()
    (shim,) = containerd.shim_pids()
    assert _arguments(shim) == _arguments(first)  # forked from it
    assert _tree_of(shim) == "one"
    with open(f"/proc/{shim}/comm", encoding="ascii") as file:
        assert file.read() == f"{SHIM[:15]}\n"
    words = ["-namespace", containerd.namespace, "-id", old.name, "-address", containerd.address]
    assert words_of(shim) == [SHIM, *words]

    os.symlink("two", f"{current}.new")
    os.rename(f"{current}.new", current)
    new = runtime.start_idle()
    (other,) = set(containerd.shim_pids()) - {shim}
    assert _tree_of(other) == "two"
    eventually(lambda: "two" in _fork_servers(containerd), "a fork server of the new tree")
    assert len(_gpus(runtime)) == 2
    for container in (old, new):
        assert container.exec("true").code == 0
        container.kill()
        assert container.exit_code() == 137
    eventually(lambda: not is_alive(shim) and not is_alive(other), "both shims end")
