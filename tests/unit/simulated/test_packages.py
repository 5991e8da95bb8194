"""Packages as data: their sources, and a cache that is complete or absent."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.simulated import driver, packages
from integration.simulated.archive import (
    Archive,
    machine_release,
    machine_sources,
    own_release,
    read_deb822,
    read_one_line,
    without_updates,
    write_deb822,
)
from integration.simulated.errors import (
    ArchiveNotFound,
    ArchiveUnreachable,
    DownloadFailed,
    PackageNotFound,
    UnpackFailed,
)
from integration.simulated.packages import unpack
from tests.harness.raising import raises
from tools.packages import fetch, in_release


@dataclass
class Shelf:
    """A Debian archive in a directory, with real packages."""

    directory: Path

    @property
    def sources(self) -> str:
        return f"Types: deb\nURIs: file:{self.directory}\nSuites: ./\nTrusted: yes\n"

    def add(
        self, name: str, version: str = "1.0", content: str = "content\n", *, depends: str = ""
    ) -> Path:
        """Build a package with one file, /usr/share/NAME/file."""
        tree = self.directory / "build"
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: {version}\nArchitecture: all\n"
            "Maintainer: Nobody <nobody@example.org>\nDescription: a test\n"
            + (f"Depends: {depends}\n" if depends else "")
        )
        (tree / f"usr/share/{name}").mkdir(parents=True)
        (tree / f"usr/share/{name}/file").write_text(content)
        deb = self.directory / f"{name}_{version}_all.deb"
        subprocess.run(["dpkg-deb", "-b", "-Znone", tree, deb], check=True, capture_output=True)
        shutil.rmtree(tree)
        self.index()
        return deb

    def index(self) -> None:
        stanzas = []
        for deb in sorted(self.directory.glob("*.deb")):
            control = subprocess.run(
                ["dpkg-deb", "-f", deb], capture_output=True, text=True, check=True
            ).stdout
            digest = hashlib.sha256(deb.read_bytes()).hexdigest()
            size = deb.stat().st_size
            stanzas.append(f"{control}Filename: ./{deb.name}\nSize: {size}\nSHA256: {digest}\n")
        packages = "\n".join(stanzas).encode()
        (self.directory / "Packages").write_bytes(packages)
        digest = hashlib.sha256(packages).hexdigest()
        (self.directory / "Release").write_text(
            f"Suite: test\nSHA256:\n {digest} {len(packages)} Packages\n"
        )


@pytest.fixture
def shelf(tmp_path: Path, usual_umask: None) -> Shelf:
    directory = tmp_path / "shelf"
    directory.mkdir()
    return Shelf(directory)


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def kept(cache: str) -> list[str]:
    """Return the files of a cache, except apt's own."""
    return sorted(name for name in os.listdir(cache) if name != "apt")


# --- Fetching


def test_package_that_only_later_drivers_have_comes_with_these(
    shelf: Shelf, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "machine_sources", lambda: shelf.sources)
    monkeypatch.setattr(driver, "PACKAGES", ("libnvidia-eglcore",))
    shelf.add("libnvidia-eglcore")
    assert driver.fetch_packages(cache) == [f"{cache}/libnvidia-eglcore_1.0_all.deb"]
    shutil.rmtree(cache)
    shelf.add("libnvidia-eglcore", "2.0", depends="libc6 (>= 2), libnvidia-gpucomp (= 2.0)")
    shelf.add("libnvidia-gpucomp", "2.0")
    both = [f"{cache}/{name}_2.0_all.deb" for name in ("libnvidia-eglcore", "libnvidia-gpucomp")]
    assert driver.fetch_packages(cache) == both
    monkeypatch.setattr(packages, "machine_sources", lambda: "nonsense")
    assert driver.fetch_packages(cache) == both


def test_packages_are_given_in_the_order_they_were_asked_for(shelf: Shelf, cache: str) -> None:
    shelf.add("zebra")
    shelf.add("ant")
    said: list[str] = []
    found = fetch(["zebra", "ant", "zebra"], cache, sources=shelf.sources, say=said.append)
    assert found == [f"{cache}/zebra_1.0_all.deb", f"{cache}/ant_1.0_all.deb"]
    assert said == ["downloading 2 packages"]
    for path in found:
        assert Path(path).read_bytes() == (shelf.directory / os.path.basename(path)).read_bytes()


def test_what_is_there_is_not_asked_for_again(shelf: Shelf, cache: str) -> None:
    shelf.add("ant")
    first = fetch(["ant"], cache, sources=shelf.sources)
    shutil.rmtree(shelf.directory)  # no archive, no network
    assert fetch(["ant"], cache, sources=shelf.sources) == first
    shutil.rmtree(f"{cache}/apt")
    assert fetch(["ant"], cache, sources="nonsense") == first
    assert kept(cache) == ["ant_1.0_all.deb"]


def test_the_path_of_a_cache_may_be_of_any_bytes(shelf: Shelf, tmp_path: Path) -> None:
    shelf.add("ant")
    cache = os.path.join(tmp_path, os.fsdecode(b"\xff\xfe"))
    (deb,) = fetch(["ant"], cache, sources=shelf.sources)
    assert os.path.isfile(deb)


def test_packages_asked_for_together_are_of_one_state_of_the_archive(
    shelf: Shelf, cache: str
) -> None:
    shelf.add("ant", "1.0")
    shelf.add("bee", "1.0")
    fetch(["ant"], cache, sources=shelf.sources)
    shelf.add("ant", "2.0")
    shelf.add("bee", "2.0")
    fetch(["ant", "bee"], cache, sources=shelf.sources)
    assert kept(cache) == ["ant_2.0_all.deb", "bee_2.0_all.deb"]


def test_what_a_package_depends_on_comes_with_it(shelf: Shelf, cache: str) -> None:
    shelf.add("ant", depends="leg (>= 1.0), eye")
    shelf.add("leg", depends="foot")
    shelf.add("eye")
    shelf.add("foot")
    shelf.add("bee")
    found = fetch(["ant"], cache, sources=shelf.sources, dependencies=True)
    names = ["ant", "eye", "foot", "leg"]
    assert [os.path.basename(path) for path in found] == [f"{name}_1.0_all.deb" for name in names]
    # The dependencies are cached, and resolved again for another set of packages.
    os.utime(f"{cache}/dependencies", (0, 0))
    assert fetch(["ant"], cache, sources="nonsense", dependencies=True) == found
    assert os.stat(f"{cache}/dependencies").st_mtime == 0  # the cache may be read-only
    more = fetch(["bee", "ant"], cache, sources=shelf.sources, dependencies=True)
    assert [os.path.basename(path) for path in more] == [
        f"{name}_1.0_all.deb" for name in ["bee", *names]
    ]
    os.unlink(f"{cache}/foot_1.0_all.deb")
    shelf.add("foot", "2.0")
    assert f"{cache}/foot_2.0_all.deb" in fetch(
        ["bee", "ant"], cache, sources=shelf.sources, dependencies=True
    )


def test_only_the_dependencies_that_were_asked_for_come_with_a_package(
    shelf: Shelf, cache: str
) -> None:
    shelf.add("ant", depends="leg, libeye")
    shelf.add("leg")
    shelf.add("libeye")

    def is_library(name: str) -> bool:
        return name.startswith("lib")

    found = fetch(["ant"], cache, sources=shelf.sources, dependencies=is_library)
    assert [os.path.basename(path) for path in found] == ["ant_1.0_all.deb", "libeye_1.0_all.deb"]
    assert fetch(["ant"], cache, sources="nonsense", dependencies=is_library) == found
    assert kept(cache) == ["ant_1.0_all.deb", "dependencies", "libeye_1.0_all.deb"]


def test_caches_of_one_release_share_its_lists(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = machine_release()
    monkeypatch.setattr("tools.packages.sources_of", lambda release, _: shelf.sources)
    for name in ("ant", "bee", "cat"):
        shelf.add(name)
    fetch(["ant"], str(tmp_path / "caches/a"), release="other")
    parsed = tmp_path / "caches/apt-other/cache/pkgcache.bin"
    before = parsed.stat()
    fetch(["bee"], str(tmp_path / "caches/b"), release="other", dependencies=True)
    assert os.path.samestat(parsed.stat(), before)  # apt has not parsed them again
    # What is new in the archive is found all the same.
    shelf.add("dog")
    fetch(["dog"], str(tmp_path / "caches/c"), release="other")
    fetch(["cat"], str(tmp_path / "caches/d"), release=own)
    assert sorted(os.listdir(tmp_path / "caches")) == ["a", "apt", "apt-other", "b", "c", "d"]


def test_a_package_whose_dependencies_are_missing_is_not_found(shelf: Shelf, cache: str) -> None:
    shelf.add("ant", depends="leg")
    with raises(PackageNotFound, match="ant"):
        fetch(["ant"], cache, sources=shelf.sources, dependencies=True)
    assert kept(cache) == []


def test_a_package_that_comes_broken_leaves_nothing(shelf: Shelf, cache: str) -> None:
    shelf.add("ant")
    deb = shelf.add("bee")
    whole = deb.read_bytes()
    deb.write_bytes(whole[:-20] + b"x" * 20)  # it no longer matches the index
    with raises(DownloadFailed) as caught:
        fetch(["ant", "bee"], cache, sources=shelf.sources)
    assert "\n" not in str(caught.value)
    assert not [name for name in kept(cache) if "bee" in name or name.startswith(".")]
    deb.write_bytes(whole)
    assert len(fetch(["ant", "bee"], cache, sources=shelf.sources)) == 2


def test_what_a_killed_process_left_does_not_count_and_goes(shelf: Shelf, cache: str) -> None:
    shelf.add("ant")
    left = Path(cache, ".download-killed")
    left.mkdir(parents=True)
    (left / "ant_1.0_all.deb").write_bytes(b"half a pack")
    (path,) = fetch(["ant"], cache, sources=shelf.sources)
    assert os.path.getsize(path) > 100
    assert kept(cache) == ["ant_1.0_all.deb"]


def test_two_versions_in_the_cache_become_one(shelf: Shelf, cache: str) -> None:
    shelf.add("ant", "2.0")
    os.makedirs(cache)
    for version in ("1.0", "2.0"):
        shutil.copy(f"{shelf.directory}/ant_2.0_all.deb", f"{cache}/ant_{version}_all.deb")
    assert fetch(["ant"], cache, sources=shelf.sources) == [f"{cache}/ant_2.0_all.deb"]
    assert kept(cache) == ["ant_2.0_all.deb"]


def test_a_name_that_begins_like_another_is_not_taken_for_it(shelf: Shelf, cache: str) -> None:
    shelf.add("ant-eater")
    shelf.add("ant")
    fetch(["ant-eater"], cache, sources=shelf.sources)
    assert fetch(["ant"], cache, sources=shelf.sources) == [f"{cache}/ant_1.0_all.deb"]


def test_two_at_once_fetch_once(shelf: Shelf, cache: str) -> None:
    shelf.add("ant")
    said: list[str] = []
    threads = [
        threading.Thread(
            target=fetch,
            args=(["ant"], cache),
            kwargs={"sources": shelf.sources, "say": said.append},
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["downloading 1 package"]
    assert kept(cache) == ["ant_1.0_all.deb"]


def test_an_unknown_package_is_named(shelf: Shelf, cache: str) -> None:
    shelf.add("ant")
    with raises(PackageNotFound, match="unicorn") as caught:
        fetch(["ant", "unicorn"], cache, sources=shelf.sources)
    assert str(caught.value).startswith("NVSHIM-E2003 package-not-found: cannot fetch ant, unicorn")
    assert kept(cache) == []


def test_no_network_is_told_from_no_package(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = tmp_path / "apt.conf"
    impatient.write_text('Acquire::Retries "0";\n')
    monkeypatch.setenv("APT_CONFIG", str(impatient))
    nowhere = "Types: deb\nURIs: http://127.0.0.1:9/debian\nSuites: ./\nTrusted: yes\n"
    with raises(ArchiveUnreachable, match="Check the network"):
        fetch(["ant"], cache, sources=nowhere)
    assert kept(cache) == []


def test_the_machines_own_lists_are_left_alone(shelf: Shelf, cache: str) -> None:
    def lists() -> list[tuple[str, float]]:
        entries = os.scandir("/var/lib/apt/lists")
        return sorted((entry.name, entry.stat().st_mtime) for entry in entries)

    shelf.add("ant")
    before = lists()
    fetch(["ant"], cache, sources=shelf.sources)
    assert lists() == before
    done = subprocess.run(
        ["apt-cache", "policy", "ant"], capture_output=True, text=True, check=True
    )
    assert str(shelf.directory) not in done.stdout


def test_without_apt_one_line_says_so(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with raises(ArchiveNotFound, match="apt-config is not installed"):
        fetch(["ant"], cache)


# --- Unpacking


def tree(directory: str) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }


def test_a_directory_becomes_what_is_in_the_packages(shelf: Shelf, tmp_path: Path) -> None:
    debs = [str(shelf.add("ant")), str(shelf.add("bee", content="honey\n"))]
    directory = str(tmp_path / "below/files")
    unpack(debs, directory)
    both = {"usr/share/ant/file": "content\n", "usr/share/bee/file": "honey\n"}
    assert tree(directory) == both
    assert oct(os.stat(directory).st_mode)[-3:] == "755"
    unpack(debs[:1], directory)
    assert tree(directory) == {"usr/share/ant/file": "content\n"}
    assert sorted(os.listdir(tmp_path / "below")) == ["files", "files.from"]


def test_what_is_unpacked_is_not_unpacked_again(shelf: Shelf, tmp_path: Path) -> None:
    deb, directory = shelf.add("ant"), str(tmp_path / "files")
    unpack([str(deb)], directory)
    before = os.stat(directory).st_ino
    deb.unlink()
    unpack([str(deb)], directory)
    assert os.stat(directory).st_ino == before


def test_finishing_touch_is_put_to_the_files_before_they_count(
    shelf: Shelf, tmp_path: Path
) -> None:
    deb, directory = str(shelf.add("ant")), str(tmp_path / "files")

    def fail(new: str) -> None:
        raise FileNotFoundError(new)

    with pytest.raises(FileNotFoundError):
        unpack([deb], directory, finish=fail)
    assert sorted(os.listdir(tmp_path)) == ["shelf"]
    times: list[str] = []

    def touch(new: str) -> None:
        times.append(new)
        Path(new, "touched").write_text("yes")

    for _ in range(2):
        unpack([deb], directory, finish=touch)
        assert tree(directory) == {"usr/share/ant/file": "content\n", "touched": "yes"}
    assert len(times) == 1


def test_an_interrupted_unpacking_is_done_again(shelf: Shelf, tmp_path: Path) -> None:
    deb, directory = str(shelf.add("ant")), str(tmp_path / "files")
    os.makedirs(f"{directory}/usr")  # without the stamp, so unpacking did not finish
    os.mkdir(tmp_path / ".unpack-killed")
    unpack([deb], directory)
    assert tree(directory) == {"usr/share/ant/file": "content\n"}
    assert not os.path.exists(tmp_path / ".unpack-killed")


def test_a_package_that_is_broken_leaves_the_directory_as_it_was(
    shelf: Shelf, tmp_path: Path
) -> None:
    good, directory = str(shelf.add("ant")), str(tmp_path / "files")
    unpack([good], directory)
    bad = tmp_path / "bad_1.0_all.deb"
    bad.write_bytes(Path(good).read_bytes()[:200])
    with raises(UnpackFailed, match=r"unpack bad_1\.0_all\.deb"):
        unpack([good, str(bad)], directory)
    assert tree(directory) == {"usr/share/ant/file": "content\n"}
    unpack([good], directory)
    assert sorted(os.listdir(tmp_path)) == ["bad_1.0_all.deb", "files", "files.from", "shelf"]


# --- The machine's archive


ONE = {"uris": "http://mirror.example/debian", "suites": "bookworm", "components": "main"}
SIGNED = {
    "uris": "http://mirror.example/debian",
    "suites": "bookworm bookworm-updates",
    "components": "main contrib",
    "signed-by": "/usr/share/keyrings/k.gpg",
}


def archive(uris: str, suites: str, components: str = "main", **options: str) -> Archive:
    """Build an archive; ``_`` stands for ``-`` in names of options."""
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return {"uris": uris, "suites": suites, "components": components, **named}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("deb http://mirror.example/debian bookworm main", [ONE]),
        ("  deb\thttp://mirror.example/debian  bookworm   main  # comment", [ONE]),
        ("# deb http://mirror.example/debian bookworm main", []),
        ("deb-src http://mirror.example/debian bookworm main", []),
        ("deb cdrom:[Debian GNU/Linux 12]/ bookworm main", []),
        ("deb [arch=amd64,arm64 lang=de] http://mirror.example/debian bookworm main", [ONE]),
        (
            "deb [ arch=amd64 Signed-By=/k.gpg trusted=yes ] http://m/d bookworm main contrib",
            [archive("http://m/d", "bookworm", "main contrib", signed_by="/k.gpg", trusted="yes")],
        ),
        ("deb http://m/flat ./", [archive("http://m/flat", "./", "")]),
        ("deb", []),
        ("deb http://m/d", []),
        ("", []),
    ],
)  # fmt: skip
def test_one_line_entries(text: str, expected: list[Archive]) -> None:
    assert read_one_line(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            ("Types: deb deb-src\nURIs: http://mirror.example/debian\n"
            "Suites: bookworm bookworm-updates\nComponents: main contrib\n"
            "Signed-By: /usr/share/keyrings/k.gpg\n"),
            [SIGNED],
        ),
        (
            ("# why\ntypes: deb\nuris: http://mirror.example/debian\n# not\nsuites: bookworm\n"
            "components: main\narchitectures: amd64\n\n\nTypes: deb-src\nURIs: x\nSuites: y\n"),
            [ONE],
        ),
        ("Enabled: no\nTypes: deb\nURIs: x\nSuites: y\nComponents: main\n", []),
        (
            ("Types: deb\nURIs: x\nSuites: y\nComponents: main\n"
            "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ==\n"),
            [archive("x", "y", signed_by="\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ==")],
        ),
        ("", []),
        ("no fields at all", []),
    ],
)  # fmt: skip
def test_deb822_stanzas(text: str, expected: list[Archive]) -> None:
    assert read_deb822(text) == expected


@given(st.text(max_size=200))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    read_deb822(text)
    read_deb822(f"Types: deb\n{text}")
    read_one_line(text)
    read_one_line(f"deb {text}")


def test_only_the_machines_own_release_is_taken() -> None:
    others = [
        archive("v", "bookworm", "stable"),  # a vendor's archive
        archive("n", "nodistro"),
        archive("b", "bookworm-backports"),
        archive("t", "trixie"),
    ]
    security = archive("s", "bookworm-security bookworm-backports")
    found = own_release([*others, SIGNED, security], "bookworm")
    assert found == [SIGNED, archive("s", "bookworm-security")]
    assert own_release(others[1:2], "") == others[1:2]


def test_a_release_itself_is_what_its_updates_and_security_fixes_are_not() -> None:
    beside = [archive("s", "trixie-security"), archive("u", "trixie-updates")]
    assert without_updates([archive("d", "trixie trixie-updates"), *beside]) == [
        archive("d", "trixie")
    ]


SECURITY = archive("s", "bookworm-security")
KEYED = archive(
    "d", "bookworm", signed_by="/usr/share/keyrings/debian-archive-keyring.gpg", trusted="no"
)


@pytest.mark.parametrize(
    ("before", "release", "expected"),
    [
        (ONE, "trixie", [{**ONE, "suites": "trixie"}]),
        (SIGNED, "trixie", [{**SIGNED, "suites": "trixie trixie-updates"}]),
        (SIGNED, "sid", [{**SIGNED, "suites": "sid"}]),
        (SECURITY, "trixie", [{**SECURITY, "suites": "trixie-security"}]),
        (SECURITY, "sid", []),
        (KEYED, "trixie", [{**KEYED, "suites": "trixie", "signed-by": "/new.gpg"}]),
    ],
)
def test_release_is_exchanged_and_nothing_else(
    before: Archive, release: str, expected: list[Archive]
) -> None:
    assert in_release([before], "bookworm", release, "/new.gpg") == expected


def test_machine_that_does_not_say_its_release_has_one_suite_exchanged() -> None:
    assert in_release([archive("d", "testing stable")], "", "sid") == [archive("d", "sid")]


def test_components_are_added_and_nothing_else_changes() -> None:
    text = write_deb822([ONE, SIGNED], ("contrib", "non-free"))
    more = {"components": "main contrib non-free"}
    assert read_deb822(text) == [{**ONE, **more}, {**SIGNED, **more}]


def test_this_machines_archive_is_found() -> None:
    archives = read_deb822(machine_sources())
    assert archives
    for each in archives:
        assert {"main", "contrib", "non-free"} <= set(each["components"].split())


@pytest.fixture
def etc_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty apt configuration of another machine."""
    etc = tmp_path / "etc"
    (etc / "sources.list.d").mkdir(parents=True)
    (tmp_path / "apt.conf").write_text(f'Dir::Etc "{etc}";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    return etc


def test_both_forms_of_an_apt_configuration_are_read(etc_apt: Path) -> None:
    release = Path("/etc/os-release").read_text()
    codename = re.findall(r"^VERSION_CODENAME=(\w+)", release, re.MULTILINE)[0]
    (etc_apt / "sources.list").write_text(f"deb [trusted=yes] http://m/old {codename} main\n")
    (etc_apt / "sources.list.d/x.sources").write_text(
        f"Types: deb\nURIs: http://m/new\nSuites: {codename}-updates\nComponents: main\n"
    )
    (etc_apt / "sources.list.d/x.list").write_text(f"deb http://m/part {codename} main\n")
    (etc_apt / "sources.list.d/x.list.save").write_text(f"deb http://m/save {codename} main\n")
    found = read_deb822(machine_sources())
    uris = [each["uris"] for each in found]
    assert uris == ["http://m/old", "http://m/part", "http://m/new"]
    assert found[0]["trusted"] == "yes"


def test_a_machine_without_an_archive_is_told_so(etc_apt: Path, cache: str) -> None:
    (etc_apt / "sources.list").write_text("deb http://vendor/apt nodistro main\n")
    with raises(ArchiveNotFound, match="no entry for this release"):
        fetch(["ant"], cache)
