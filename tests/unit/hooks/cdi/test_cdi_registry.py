"""Which spec file has which device: directories, priorities, conflicts, files one may not use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hooks.cdi import files, tree
from hooks.cdi.errors import CdiDeviceConflict, CdiDeviceUnknown, CdiFileUnusable
from hooks.cdi.registry import Registry, resolve
from hooks.cdi.spec import parse_name


def write(path: Path, *devices: str, kind: str = "vendor.com/device", env: str = "A=b") -> Path:
    path.parent.mkdir(exist_ok=True)
    file = {
        "cdiVersion": "0.5.0",
        "kind": kind,
        "devices": [{"name": d, "containerEdits": {"env": [env]}} for d in devices],
    }
    path.write_text(json.dumps(file))
    return path


def found_in(directories: list[Path], name: str) -> str:
    (found,) = resolve([name], map(str, directories)).devices
    return os.path.basename(found.file.path)


def test_devices_are_found_in_both_directories(tmp_path: Path) -> None:
    etc, run = tmp_path / "etc", tmp_path / "run"
    write(etc / "a.json", "0")
    write(run / "b.json", "1")
    assert found_in([etc, run], "vendor.com/device=0") == "a.json"
    assert found_in([etc, run], "vendor.com/device=1") == "b.json"


def test_later_directory_wins_device_by_device(tmp_path: Path) -> None:
    etc, run = tmp_path / "etc", tmp_path / "run"
    write(etc / "a.json", "0", "1")
    write(run / "b.json", "1")
    assert found_in([etc, run], "vendor.com/device=1") == "b.json"
    assert found_in([etc, run], "vendor.com/device=0") == "a.json"
    assert found_in([run, etc], "vendor.com/device=1") == "a.json"


def test_device_of_two_files_of_one_directory_is_in_conflict(tmp_path: Path) -> None:
    etc, run = tmp_path / "etc", tmp_path / "run"
    write(etc / "a.json", "0", "1")
    write(etc / "b.yaml", "0", "2")
    with pytest.raises(CdiDeviceConflict, match=r"etc/a\.json and .*etc/b\.yaml both") as caught:
        resolve(["vendor.com/device=0"], [str(etc), str(run)])
    assert caught.value.code == "NVSHIM-E0605"
    assert found_in([etc], "vendor.com/device=1") == "a.json"
    assert found_in([etc], "vendor.com/device=2") == "b.yaml"
    # A directory that decides is not in conflict with those that do not.
    write(run / "c.json", "0")
    assert found_in([etc, run], "vendor.com/device=0") == "c.json"


def test_files_of_other_names_directories_and_missing_places_do_not_count(tmp_path: Path) -> None:
    write(tmp_path / "a.yml", "0")
    write(tmp_path / "a.json.bak", "0")
    write(tmp_path / "below" / "a.json", "0")
    (tmp_path / "dir.json").mkdir()
    registry = Registry.of([str(tmp_path), str(tmp_path / "missing")])
    assert (registry.files, registry.faults) == ([], [])


def test_link_to_a_file_counts(tmp_path: Path) -> None:
    target = write(tmp_path / "elsewhere" / "x", "0")
    (tmp_path / "a.json").symlink_to(target)
    assert found_in([tmp_path], "vendor.com/device=0") == "a.json"


def test_unknown_device_is_told_which_there_are(tmp_path: Path) -> None:
    write(tmp_path / "a.json", *"abcdef")
    with pytest.raises(CdiDeviceUnknown, match="has a, b, c, d and 2 more"):
        resolve(["vendor.com/device=x"], [str(tmp_path)])
    with pytest.raises(CdiDeviceUnknown, match=f"no spec of other.com/device in {tmp_path}"):
        resolve(["other.com/device=x"], [str(tmp_path)])


def make_broken(path: Path) -> None:
    path.write_text('{"cdiVersion": "0.5.0", "kind": "vendor.com/broken", "devices": [], "x": 1}')


def make_somebody_elses(path: Path) -> None:
    write(path, "0")
    os.chown(path, 12345, 0)


def make_writable(path: Path) -> None:
    write(path, "0")
    path.chmod(0o666)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 20)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (lambda p: p.write_text("{"), "no JSON"),
    "an unknown field": (make_broken, "x: unknown field"),
    "empty": (lambda p: p.write_text(""), "it is no object"),
    "a FIFO": (os.mkfifo, "it is no regular file"),
    "a link to a device": (lambda p: p.symlink_to("/dev/full"), "it is no regular file"),
    "somebody else's": (make_somebody_elses, "user 12345 owns it"),
    "writable for others": (make_writable, "everybody may write it"),
    "too large": (make_large, "longer than 4 MiB"),
    "a cycle of links": (lambda p: p.symlink_to(p), "symbolic links"),
}


@pytest.mark.parametrize("make", list(BROKEN), ids=list(BROKEN))
def test_broken_file_takes_nothing_from_the_others_and_is_named_to_who_misses_it(
    tmp_path: Path, make: str
) -> None:
    write(tmp_path / "a.json", "0")
    make_it, fault = BROKEN[make]
    make_it(tmp_path / "broken.json")
    assert found_in([tmp_path], "vendor.com/device=0") == "a.json"
    with pytest.raises(CdiDeviceUnknown) as caught:
        resolve(["vendor.com/broken=0"], [str(tmp_path)])
    assert "broken.json cannot be used" in caught.value.found
    assert fault in caught.value.found


def test_broken_file_of_another_kind_is_not_named(tmp_path: Path) -> None:
    make_broken(tmp_path / "broken.json")
    with pytest.raises(CdiDeviceUnknown) as caught:
        resolve(["vendor.com/another=0"], [str(tmp_path)])
    assert "broken.json" not in str(caught.value)


def test_dangling_link_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("nowhere")
    assert Registry.of([str(tmp_path)]).faults == []


def test_directory_that_everybody_may_write_counts_only_if_it_is_sticky(tmp_path: Path) -> None:
    write(tmp_path / "specs" / "a.json", "0")
    directory = tmp_path / "specs"
    directory.chmod(0o777)
    with pytest.raises(CdiDeviceUnknown, match="specs cannot be used: everybody may write it"):
        found_in([directory], "vendor.com/device=0")
    directory.chmod(0o1777)
    assert found_in([directory], "vendor.com/device=0") == "a.json"


def test_link_of_another_user_counts_for_nothing(tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "image" / "evil.json", "0")
    directory = tmp_path / "specs"
    directory.mkdir(mode=0o1777)
    (directory / "a.json").symlink_to(elsewhere)
    assert found_in([directory], "vendor.com/device=0") == "a.json"
    os.chown(directory / "a.json", 1234, 1234, follow_symlinks=False)
    with pytest.raises(CdiDeviceUnknown, match="a link of user 1234"):
        found_in([directory], "vendor.com/device=0")


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


def test_devices_come_in_the_order_of_their_names_and_once(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "0", "1")
    wanted = ["vendor.com/device=1", "vendor.com/device=0", "vendor.com/device=1"]
    resolved = resolve(wanted, [str(tmp_path)])
    assert [str(found.name) for found in resolved.devices] == wanted[:2]
    assert resolved.devices[0].name == parse_name(wanted[0])


def in_yaml(name: str = "vendor.com/device") -> str:
    return (
        f"cdiVersion: 0.5.0\nkind: {name}\ndevices:\n- name: a\n  containerEdits:\n    env: [A=b]\n"
    )


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory, in which what was written just now is kept too."""
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
    write(tmp_path / "a.json", "0")
    (tmp_path / "other.yaml").write_text(in_yaml("other.com/device"))
    (tmp_path / "escaped.yaml").write_text(in_yaml('"hidden.com\\x2fdevice"'))
    read: list[str] = []
    real = files.tree_of

    def tree_of(data: bytes, path: str) -> object:
        read.append(os.path.basename(path))
        return real(data, path)

    monkeypatch.setattr(files, "tree_of", tree_of)
    assert found_in([tmp_path], "vendor.com/device=0") == "a.json"
    assert sorted(read) == ["a.json", "escaped.yaml"]
    assert found_in([tmp_path], "hidden.com/device=a") == "escaped.yaml"
