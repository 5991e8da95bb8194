"""Images of the machine's files are deterministic, complete, and have what a container needs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.simulated import images
from integration.simulated.errors import ImageBuildFailed, SourceNotInstalled
from tests.harness.raising import raises
from tools.images import (
    Directory,
    File,
    Image,
    Link,
    behind_link,
    busybox,
    compile_program,
    glibc,
    write_archive,
)

TREE: images.Tree = {
    "usr/bin/tool": File(b"#!/bin/sh\n", 0o755),
    "bin": Link("usr/bin"),
    "etc/deep/er/file": File(b"text"),
    "tmp": Directory(0o1777),
}


def _read(archive: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read the index of an OCI archive, and its files by path."""
    with tarfile.open(archive) as tar:
        files = {}
        for member in tar.getmembers():
            if (file := tar.extractfile(member)) is not None:
                files[member.name] = file.read()
    return json.loads(files["index.json"]), files


def _blob(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    blob = files["blobs/sha256/" + descriptor["digest"].removeprefix("sha256:")]
    assert len(blob) == descriptor["size"]
    assert "sha256:" + hashlib.sha256(blob).hexdigest() == descriptor["digest"]
    return blob


def test_same_tree_in_another_order_gives_the_same_archive(tmp_path: Path) -> None:
    first = write_archive(str(tmp_path / "a"), [Image("x:1", TREE)])
    backwards = dict(reversed(TREE.items()))
    second = write_archive(str(tmp_path / "b"), [Image("x:1", backwards)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert [first, second] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_archive_is_what_the_image_specification_wants(tmp_path: Path) -> None:
    image = Image(
        "name/of:it", TREE, environment={"A": "b"}, entrypoint=("tool",), labels={"who": "we"}
    )
    index, files = _read(write_archive(str(tmp_path / "archive"), [image]))
    (descriptor,) = index["manifests"]
    assert descriptor["annotations"]["io.containerd.image.name"] == "name/of:it"
    manifest = json.loads(_blob(files, descriptor))
    config = json.loads(_blob(files, manifest["config"]))
    layer = _blob(files, manifest["layers"][0])
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]
    assert config["config"]["Env"][-1] == "A=b"
    assert config["config"]["Env"][0].startswith("PATH=/")
    assert config["config"]["Entrypoint"] == ["tool"]
    assert config["config"]["Labels"] == {"who": "we"}


def test_images_of_one_tree_share_its_layer(tmp_path: Path) -> None:
    image = Image("x:1", TREE)
    _, files = _read(
        write_archive(str(tmp_path / "archive"), [image, image.named("x:2", environment={"A": ""})])
    )
    blobs = [name for name in files if name.startswith("blobs/")]
    assert len(blobs) == 5, "one layer, two configurations, two manifests"


def test_unpacked_tree_has_the_modes_and_links_it_says(tmp_path: Path) -> None:
    root = images.unpack(TREE, str(tmp_path / "root"))
    assert os.readlink(f"{root}/bin") == "usr/bin"
    assert os.stat(f"{root}/bin/tool").st_mode & 0o7777 == 0o755
    assert os.stat(f"{root}/tmp").st_mode & 0o7777 == 0o1777
    assert os.stat(f"{root}/etc/deep").st_mode & 0o7777 == 0o755
    with open(f"{root}/etc/deep/er/file") as file:
        assert file.read() == "text"


@pytest.mark.parametrize(
    ("path", "target", "place"),
    [
        ("etc", "/data/etc", "data/etc/deep/er/file"),
        ("etc", "data/etc", "data/etc/deep/er/file"),
        ("etc/deep", "/data", "data/er/file"),
        ("etc/deep", "../data", "data/er/file"),
        ("etc/deep/er/file", "other", "etc/deep/er/other"),
        ("etc", "../../../data", "data/deep/er/file"),
    ],
)
def test_what_moves_behind_a_link_is_found_through_it(
    tmp_path: Path, path: str, target: str, place: str
) -> None:
    tree = behind_link(TREE, path, target=target)
    assert tree[path] == Link(target)
    assert tree[place] == TREE["etc/deep/er/file"]
    assert len(tree) == len(TREE) + 1
    images.unpack(tree, str(tmp_path / "root"))


def test_busybox_has_the_applets_as_links() -> None:
    tree = busybox().tree
    assert isinstance(tree["usr/bin/busybox"], File)
    assert tree["usr/bin/sh"] == tree["usr/bin/true"] == Link("busybox")


def test_programs_of_the_glibc_image_run_on_its_own_libraries(tmp_path: Path) -> None:
    root = images.unpack(glibc().tree, str(tmp_path / "root"))

    def inside(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/usr/sbin/chroot", root, *argv], capture_output=True, text=True, check=False, env={}
        )

    assert inside("/usr/bin/ls", "/").stdout.split()[:2] == ["bin", "dev"]
    listed = inside("/usr/sbin/ldconfig", "-p").stdout
    assert "libc.so.6" in listed
    loaded = inside("/usr/bin/probe", "dlopen", "libm.so.6", "libno-such.so")
    assert loaded.returncode == 1
    assert loaded.stdout.splitlines()[0].startswith("libm.so.6 /")
    assert loaded.stdout.splitlines()[1].startswith("libno-such.so - ")
    assert inside("/usr/bin/probe", "open", "/etc/passwd", "/no").stdout == (
        "/etc/passwd OK\n/no ENOENT\n"
    )
    assert inside("/usr/bin/probe", "exit", "33").returncode == 33


def test_image_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_archive(str(tmp_path / name), [images.glibc(), busybox()])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_missing_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_SEARCH_PATH", "/no/such/directory")
    with raises(SourceNotInstalled, match=r"busybox.*Install the package busybox-static"):
        busybox()


def test_compilers_refusal_is_quoted(tmp_path: Path) -> None:
    source = tmp_path / "wrong.c"
    source.write_text("int main(void) { return nothing; }\n")
    with raises(ImageBuildFailed, match="nothing"):
        compile_program(str(source))


def test_image_can_be_given_another_tree() -> None:
    image = Image("x:1", TREE)
    assert replace(image, tree={}).name == image.name
