"""The metadata of the .deb; and building the same tree twice gives the same package."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from integration.tree import Tree
from tests.harness.own_process import restored
from tests.harness.raising import raises
from tools.dist.debian import package_name, package_version, write_package
from tools.dist.inputs import Inputs
from tools.dist.manifest import write_tree
from tools.errors import TreeNotBuilt

INPUTS = Inputs(
    source="/nowhere", version="1.2.0", revision="abc1234-dirty", epoch=1_700_000_000,
    architecture="arm64",
)  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    path = tmp_path / "tree"
    files = {
        "bin/nvshim": "#!",
        "share/systemd/x.service": "[Service]\nExecStart=/usr/local/bin/nvshim node\n",
        "share/bash-completion/completions/nvshim": "#",
        "share/fish/vendor_completions.d/nvshim.fish": "#",
        "share/zsh/site-functions/_nvshim": "#",
        "share/man/man1/nvshim.1": ".TH NVSHIM 1\n",
    }
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    (path / "bin/nvshim").chmod(0o755)
    (path / "link").symlink_to("bin/nvshim")
    return write_tree(
        str(path), version="1.2.0", revision="abc", architecture="arm64", python="3.11.2"
    )


def _field(package: str, name: str) -> str:
    return subprocess.check_output(["dpkg-deb", "--field", package, name], text=True).strip()


def _is_older(one: str, other: str) -> bool:
    return subprocess.call(["dpkg", "--compare-versions", one, "lt", other]) == 0


def test_versions_of_packages_have_the_order_of_commits_and_releases() -> None:
    versions = [
        package_version(replace(INPUTS, version="1.1.0", released=True)),
        package_version(INPUTS),
        package_version(replace(INPUTS, epoch=INPUTS.epoch + 1, revision="0000000")),
        package_version(replace(INPUTS, released=True)),
        package_version(replace(INPUTS, version="1.10.0", revision="")),
    ]
    for one, other in itertools.pairwise(versions):
        assert _is_older(one, other), (one, other)


def test_the_package_says_what_it_is_and_where_its_files_go(tree: Tree, tmp_path: Path) -> None:
    package = str(tmp_path / package_name(INPUTS))
    write_package(tree, INPUTS, package, compression="-Znone")
    assert _field(package, "Architecture") == "arm64"
    assert _field(package, "Version") == package_version(INPUTS)
    assert _field(package, "Depends") == ""
    subprocess.run(["dpkg-deb", "-R", package, tmp_path / "root"], check=True)
    root = tmp_path / "root"
    assert {name.name for name in root.iterdir()} == {"DEBIAN", "lib", "usr"}
    assert (root / "usr/lib/containerd-shim-nvidia/tree.json").exists()
    assert os.readlink(root / "usr/lib/containerd-shim-nvidia/link") == "bin/nvshim"
    unit = (root / "lib/systemd/system/x.service").read_text()
    assert "ExecStart=/usr/bin/nvshim node" in unit
    for script in ("postinst", "prerm", "postrm"):
        subprocess.run(["sh", "-n", root / "DEBIAN" / script], check=True)
        assert os.access(root / "DEBIAN" / script, os.X_OK)
        text = (root / "DEBIAN" / script).read_text()
        assert "units='x.service'\n" in text
        assert not re.search(r"[^$]\{[a-z]", text), "a blank that was not filled in"
    sums = (root / "DEBIAN/md5sums").read_bytes()
    subprocess.run(["md5sum", "--check", "--quiet"], input=sums, cwd=root, check=True)


def test_the_same_tree_gives_the_same_package(tree: Tree, tmp_path: Path) -> None:
    packages = []
    for number, umask in enumerate((0o022, 0o077)):
        path = tmp_path / f"{number}.deb"
        with restored():
            os.umask(umask)
            write_package(tree, INPUTS, str(path), compression="-Zxz -z0")
        packages.append(path.read_bytes())
    assert packages[0] == packages[1]
    assert sorted(os.listdir(tmp_path)) == ["0.deb", "1.deb", "tree"]


def test_a_package_that_cannot_be_made_leaves_nothing(tree: Tree, tmp_path: Path) -> None:
    with raises(TreeNotBuilt, match="unknown compression type"):
        write_package(tree, INPUTS, str(tmp_path / "x.deb"), compression="-Znonsense")
    assert os.listdir(tmp_path) == ["tree"]


def test_what_is_installed_cannot_build_itself(tmp_path: Path) -> None:
    with raises(TreeNotBuilt, match="no checkout at"):
        Inputs.of(str(tmp_path))


def test_a_checkout_without_its_history_has_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "7.8.9"\n')
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = Inputs.of(str(tmp_path))
    assert (found.version, found.revision, found.epoch, found.released) == (
        "7.8.9", "", 1234, False,
    )  # fmt: skip
