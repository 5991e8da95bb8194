"""The packages install, upgrade and go, by the real package managers, in real roots."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pytest

from tests.harness.bare_root import bare_root
from tests.harness.dist import copied, inputs
from tools.dist import debian, rpm
from tools.dist.manifest import write_tree
from tools.vm.guest import install

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.tree import Tree
    from tests.harness.bare_root import BareRoot
    from tests.release.conftest import Release

PROJECT: Final = "containerd-shim-nvidia"
SHIM: Final = f"{PROJECT}-v1"
PREFIX: Final = f"opt/{PROJECT}"


_ONLY_OF_THE_FIRST: Final = f"""
with open(__file__.rpartition("/lib/")[0] + "/bin/{SHIM}.py") as _file:
    if "later" in _file.read():
        raise ImportError("a module of another version")
"""


@pytest.fixture
def trees(built_tree: Tree, tmp_path: Path) -> tuple[Tree, Tree]:
    """Two of one version; where the second has a module, the first has a package of that name.

    As long as both are there, it is the package that is imported.
    """
    older = copied(built_tree, str(tmp_path / "older"))
    module = os.path.join(older.path, "lib", "integration", "files")
    with open(f"{module}.py", encoding="utf-8") as file:
        text = file.read()
    for name in (f"{module}.py", os.path.join(older.path, "tree.json")):
        os.unlink(name)
    os.mkdir(module)
    with open(f"{module}/__init__.py", "w", encoding="utf-8") as file:
        file.write(text + _ONLY_OF_THE_FIRST)
    first = write_tree(
        older.path, version=older.version, revision=older.revision,
        architecture=older.architecture, python=older.python,
    )  # fmt: skip
    return first, copied(built_tree, str(tmp_path / "newer"), revision="later")


# -- the .rpm -------------------------------------------------------------------------------


@pytest.fixture
def red_hat(tmp_path: Path) -> Iterator[BareRoot]:
    (tmp_path / "root").mkdir()
    with bare_root(str(tmp_path / "root")) as root:
        os.makedirs(f"{root.path}/var/lib/rpm")
        os.makedirs(f"{root.path}/var/tmp")
        yield root


def _rpm(root: BareRoot, *words: str) -> str:
    # The root has a shell, and no package that says so.
    argv = ["rpm", "--root", root.inside, "--dbpath", "/var/lib/rpm", "--nodeps", "--force-debian"]
    done = root.run(*argv, *words, host=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rpm_installs_upgrades_and_goes(
    trees: tuple[Tree, Tree], red_hat: BareRoot, tmp_path: Path
) -> None:
    packages = []
    for number, tree in enumerate(trees):
        made_of = replace(inputs(), revision=tree.revision, epoch=1_700_000_000 + 60 * number)
        packages.append(str(tmp_path / rpm.package_name(made_of)))
        rpm.write_package(tree, made_of, packages[-1], compression="w0.gzdio")
    prefix = f"{red_hat.path}/{PREFIX}"

    _rpm(red_hat, "--install", packages[0])
    first = os.readlink(f"{prefix}/current")
    assert "Revision: tested" in red_hat.run(SHIM, "-v").stdout
    assert _rpm(red_hat, "--verify", PROJECT) == ""

    _rpm(red_hat, "--upgrade", packages[1])
    assert os.readlink(f"{prefix}/current") != first
    assert "Revision: later" in red_hat.run(SHIM, "-v").stdout
    assert _rpm(red_hat, "--verify", PROJECT) == ""
    assert red_hat.run("nvshim", "status").returncode == 0

    _rpm(red_hat, "--erase", PROJECT)
    assert not os.path.exists(prefix)
    assert os.listdir(f"{red_hat.path}/usr/bin") == []
    assert _files(red_hat.path, "usr") == set()


def test_an_rpm_that_an_engine_relies_on_leaves_what_that_names(
    built_tree: Tree, red_hat: BareRoot, tmp_path: Path
) -> None:
    package = str(tmp_path / rpm.package_name(inputs()))
    rpm.write_package(built_tree, inputs(), package, compression="w0.gzdio")
    _rpm(red_hat, "--install", package)
    config = f"{red_hat.path}/etc/containerd/config.toml"
    os.makedirs(os.path.dirname(config))
    with open(config, "w", encoding="ascii") as file:
        file.write('runtime_type = "io.containerd.nvidia.v1"\n')
    assert "nvshim configure containerd --remove" in _rpm(red_hat, "--erase", PROJECT)
    assert red_hat.run(SHIM, "-v").returncode == 0


# -- the .deb -------------------------------------------------------------------------------


def test_lintian_finds_nothing_and_needs_every_override(release: Release) -> None:
    done = subprocess.run(
        ["lintian", "--display-info", "--allow-root", release.one(".deb")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    findings = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("E:", "W:")) or "unused-override" in line
    ]
    assert findings == [], done.stderr
    assert done.stdout.startswith("I:")  # it has looked


@dataclass(frozen=True, slots=True)
class DebianRoot:
    """A root with a release of Debian, on a disk."""

    path: str  # where it is

    def run(self, command: str, *, status: int = 0) -> str:
        """Run a shell's command in it; returns what it says, and fails if its status is another."""
        enter = 'mount -t proc proc "$0/proc" && exec chroot "$0" sh -c "$1"'
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", enter,
             self.path, command],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8",
                 "DEBIAN_FRONTEND": "noninteractive", "NVSHIM_SELF_TEST": "0"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == status, f"{command}: {done.stdout}"
        return done.stdout

    def read(self, name: str) -> bytes:
        """A file's content."""
        with open(os.path.join(self.path, name), "rb") as file:
            return file.read()


@pytest.fixture(params=["bookworm", "trixie"])
def debian_root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DebianRoot]:
    path = str(tmp_path / "root")
    install(request.param, ("containerd", "runc", "systemd"), path)
    # Of the installation: what packages have below /usr/share/doc is to be there from here on.
    for name in os.listdir(f"{path}/etc/dpkg/dpkg.cfg.d"):
        os.unlink(f"{path}/etc/dpkg/dpkg.cfg.d/{name}")
    yield DebianRoot(path)
    shutil.rmtree(path)


# What package managers and whoever runs as root leave of themselves.
_OF_OTHERS: Final = ("var/cache/", "var/lib/apt/", "var/lib/dpkg/", "var/log/", "run/", "tmp/")


def _files(root: str, below: str = ".") -> set[str]:
    found = {
        os.path.relpath(os.path.join(above, name), root)
        for above, _, names in os.walk(os.path.join(root, below))
        for name in names
    }
    return {name for name in found if not name.startswith(_OF_OTHERS)}


def test_the_deb_leaves_of_each_step_what_it_must(
    trees: tuple[Tree, Tree], debian_root: DebianRoot
) -> None:
    root = debian_root
    config = f"etc/{PROJECT}/config.toml"
    os.makedirs(os.path.dirname(f"{root.path}/{config}"))
    with open(f"{root.path}/{config}", "w", encoding="ascii") as file:
        file.write("# an administrator's\n")
    os.makedirs(f"{root.path}/etc/containerd", exist_ok=True)
    root.run("containerd config default >/etc/containerd/config.toml")
    engine = root.read("etc/containerd/config.toml")
    before = _files(root.path)
    for number, tree in enumerate(trees):
        made_of = replace(inputs(), revision=tree.revision, epoch=1_700_000_000 + 60 * number)
        debian.write_package(tree, made_of, f"{root.path}/tmp/{number}.deb", compression="-Znone")

    root.run("apt-get install -y /tmp/0.deb")
    assert "Revision: tested" in root.run(f"{SHIM} -v")
    root.run("nvshim configure containerd && systemctl enable nvshim-node.service")
    configured = root.read("etc/containerd/config.toml")
    assert configured != engine
    enabled = "etc/systemd/system/multi-user.target.wants/nvshim-node.service"
    assert os.path.lexists(f"{root.path}/{enabled}")

    root.run("apt-get install -y /tmp/1.deb")  # an upgrade
    assert "Revision: later" in root.run(f"{SHIM} -v")
    assert root.run(f"dpkg --verify {PROJECT}") == ""
    assert root.read("etc/containerd/config.toml") == configured
    assert os.path.lexists(f"{root.path}/{enabled}")

    said = root.run(f"apt-get remove -y {PROJECT}")  # while containerd names the shim
    assert "nvshim configure containerd --remove" in said
    assert "Revision: later" in root.run(f"{SHIM} -v")
    assert root.read("etc/containerd/config.toml") == configured

    root.run("apt-get install -y /tmp/1.deb && nvshim configure containerd --remove")
    assert root.read("etc/containerd/config.toml") == engine
    root.run(f"apt-get remove -y {PROJECT}")
    assert not os.path.exists(f"{root.path}/{PREFIX}")
    assert not os.path.lexists(f"{root.path}/{enabled}")
    root.run(f"apt-get purge -y {PROJECT}")
    assert root.read(config) == b"# an administrator's\n"
    assert _files(root.path) == before
