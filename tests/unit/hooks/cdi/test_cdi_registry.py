"""Finding a device's spec file: directories, priorities, conflicts and unsafe files.

``registry.json`` has for each case the file of each device, or the error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from api.errors import NvshimError
from hooks.cdi import files, tree
from hooks.cdi.errors import CdiFileUnusable
from hooks.cdi.registry import Registry, resolve
from tests.unit.hooks.golden import Golden
from tests.unit.hooks.image.images import Make, fill, to

KIND = "vendor.com/device"


def of(*devices: str) -> bytes:
    """Return a spec file with these devices."""
    edited = [{"name": name, "containerEdits": {"env": ["A=b"]}} for name in devices]
    return json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": edited}).encode()


def owned(make: Make, mode: int = 0o644, uid: int = 0) -> Make:
    """Give a file, created if needed, another mode and owner; a link is not followed."""

    def made(path: str) -> None:
        fill("", {path: make})
        os.chown(path, uid, 0, follow_symlinks=False)
        if not os.path.islink(path):
            os.chmod(path, mode)

    return made


def there(_: str) -> None:
    """Do nothing: the file exists."""


BROKEN: dict[str, Make] = {
    "no JSON": b"{",
    "an unknown field": (
        b'{"cdiVersion": "0.5.0", "kind": "vendor.com/broken", "devices": [], "x": 1}'
    ),
    "empty": b"",
    "a FIFO": os.mkfifo,
    "a link to a device": to("/dev/full"),
    "somebody else's": owned(of("0"), uid=12345),
    "writable for others": owned(of("0"), 0o666),
    "too large": lambda path: fill("", {path: bytes(5 << 20)}),
    "a cycle of links": lambda path: os.symlink(path, path),
}


@dataclass(frozen=True)
class Case:
    """Files below /etc and /run, and the requested devices, by default of KIND."""

    files: Mapping[str, Make]
    wanted: tuple[str, ...] = ("0",)
    directories: tuple[str, ...] = ("/etc", "/run")


TWO = {"/etc/a.json": of("0", "1"), "/run/b.json": of("1")}
AT_ODDS = {"/etc/a.json": of("0", "1"), "/etc/b.yaml": of("0", "2")}
OPEN = {"/etc/a.json": of("0")}
CASES: dict[str, Case] = {
    "two directories, the later one first": Case(TWO, ("1", "0")),
    "two directories, the other way round": Case(TWO, ("1",), ("/run", "/etc")),
    "two files of one directory": Case(AT_ODDS),
    "two files of one directory, other devices": Case(AT_ODDS, ("1", "2")),
    # A directory with a higher priority does not conflict with the others.
    "two files of one directory, and a later one": Case({**AT_ODDS, "/run/c.json": of("0")}),
    "other names, a directory, and a missing place": Case(
        {
            "/etc/a.yml": of("0"), "/etc/a.json.bak": of("0"), "/etc/below/a.json": of("0"),
            "/etc/dir.json": os.mkdir,
        }
    ),
    "link to a file": Case({"/elsewhere/x": of("0"), "/etc/a.json": to("../elsewhere/x")}),
    "dangling link": Case({"/etc/a.json": to("nowhere")}),
    "unknown device": Case({"/etc/a.json": of(*"abcdef")}, ("x",)),
    "unknown kind": Case({"/etc/a.json": of("0")}, ("other.com/device=x",)),
    "devices twice": Case({"/etc/a.json": of("0", "1")}, ("1", "0", "1")),
    **{
        f"{looked_for}, and a file that is {what}": Case(
            {"/etc/a.json": of("0"), "/etc/broken.json": make}, (name,)
        )
        for what, make in BROKEN.items()
        for looked_for, name in (("another's", "0"), ("its own", "vendor.com/broken=0"))
    },
    "another kind than that of a broken file": Case(
        {"/etc/broken.json": BROKEN["an unknown field"]}, ("vendor.com/another=0",)
    ),
    "directory that everybody may write": Case({**OPEN, "/etc": owned(there, 0o777)}),
    "directory that everybody may write, and that is sticky": Case(
        {**OPEN, "/etc": owned(there, 0o1777)}
    ),
    **{
        f"link of user {uid} in such a directory": Case(
            {
                "/image/evil.json": of("0"),
                "/etc/a.json": owned(to("../image/evil.json"), uid=uid),
                "/etc": owned(there, 0o1777),
            }
        )
        for uid in (0, 1234)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_device_is_of(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    fill(str(tmp_path), case.files)
    wanted = [each if "=" in each else f"{KIND}={each}" for each in case.wanted]
    try:
        resolved = resolve(wanted, [f"{tmp_path}{each}" for each in case.directories])
        found = [f"{each.name} {each.file.path}" for each in resolved.devices]
    except NvshimError as error:
        found = [str(error)]
    shown = [each.replace(str(tmp_path), "") for each in found]
    Golden("registry.json").compare(name, shown)


def test_directory_that_is_removed_meanwhile_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "specs"
    directory.mkdir()
    opened = files.open_directory

    def open_and_remove(path: str) -> int | None:
        fd = opened(path)
        directory.rmdir()
        return fd

    monkeypatch.setattr(files, "open_directory", open_and_remove)
    registry = Registry.of([str(directory)])
    assert (registry.files, registry.faults) == ([], [])


def test_directory_that_is_a_file_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "specs").write_text("")
    with pytest.raises(CdiFileUnusable):
        files.open_directory(str(tmp_path / "specs"))
    assert [f.error.code for f in Registry.of([str(tmp_path / "specs")]).faults] == ["NVSHIM-E0601"]


def in_yaml(name: str = "vendor.com/device") -> str:
    return (
        f"cdiVersion: 0.5.0\nkind: {name}\ndevices:\n- name: a\n  containerEdits:\n    env: [A=b]\n"
    )


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a state directory that caches even files that were written just now."""
    monkeypatch.setattr(files, "_SETTLED", 0.0)
    return tmp_path / "state"


def test_yaml_is_parsed_once_and_again_after_each_change(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = tmp_path / "specs"
    specs.mkdir()
    file = specs / "a.yaml"
    file.write_text(in_yaml())
    parsed: list[str] = []

    def of_yaml(text: str) -> object:
        parsed.append(text)
        return tree.of_yaml(text)

    monkeypatch.setattr(files, "of_yaml", of_yaml)

    def found() -> str:
        (one,) = resolve(["vendor.com/device=a"], [str(specs)], state=str(state)).devices
        return one.device.edits.env[0]

    assert [found(), found(), found()] == ["A=b"] * 3
    assert len(parsed) == 1
    assert (state / "cdi").stat().st_mode & 0o777 == 0o700
    file.write_text(in_yaml().replace("A=b", "A=c"))
    assert [found(), found()] == ["A=c"] * 2
    assert len(parsed) == 2
    for place in (state / "cdi").iterdir():
        place.write_text("{")
    assert found() == "A=c"
    assert len(parsed) == 3


def test_what_was_changed_just_now_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(in_yaml())
    resolve(["vendor.com/device=a"], [str(tmp_path)], state=str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()


def test_kept_file_of_somebody_else_does_not_count(tmp_path: Path, state: Path) -> None:
    (tmp_path / "a.yaml").write_text(in_yaml())
    wanted = ["vendor.com/device=a"]
    resolve(wanted, [str(tmp_path)], state=str(state))
    (place,) = (state / "cdi").iterdir()
    place.write_text(place.read_text().replace("A=b", "EVIL=1"))
    os.chown(place, 12345, 0)
    (found,) = resolve(wanted, [str(tmp_path)], state=str(state)).devices
    assert found.device.edits.env == ("A=b",)


def test_no_more_than_a_handful_is_kept(tmp_path: Path, state: Path) -> None:
    for number in range(40):
        (tmp_path / "a.yaml").write_text(in_yaml() + "#" * number)
        resolve(["vendor.com/device=a"], [str(tmp_path)], state=str(state))
    assert 1 < len(list((state / "cdi").iterdir())) <= 32


def test_state_that_cannot_be_written_is_no_error(tmp_path: Path, state: Path) -> None:
    (tmp_path / "a.yaml").write_text(in_yaml())
    state.write_text("a file")
    assert resolve(["vendor.com/device=a"], [str(tmp_path)], state=str(state)).devices


def test_file_that_mentions_no_wanted_kind_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_bytes(of("0"))
    (tmp_path / "other.yaml").write_text(in_yaml("other.com/device"))
    (tmp_path / "escaped.yaml").write_text(in_yaml('"hidden.com\\x2fdevice"'))
    read: list[str] = []
    real = files.tree_of

    def tree_of(data: bytes, path: str) -> object:
        read.append(os.path.basename(path))
        return real(data, path)

    monkeypatch.setattr(files, "tree_of", tree_of)
    assert resolve([f"{KIND}=0"], [str(tmp_path)]).devices
    assert sorted(read) == ["a.json", "escaped.yaml"]
    assert resolve(["hidden.com/device=a"], [str(tmp_path)]).devices
