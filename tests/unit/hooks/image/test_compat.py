"""Whether an image's own libcuda takes precedence over the driver's: the rules, then real files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hooks.edits.compat import (
    Candidate,
    Compat,
    Host,
    Note,
    choose,
    find_compat,
    host_of,
    with_compat,
)
from hooks.image.layout import read_layout
from hooks.image.rootfs import Rootfs
from hooks.node.gpus import Gpu
from hooks.plan import CachedLibrary, Plan
from hooks.words import Arch
from tests.harness.libcuda import build_libcuda, note
from tests.unit.hooks.image.images import Make, device, fill, to

H100, A6000 = "NVIDIA H100 80GB HBM3", "NVIDIA RTX A6000"
GEFORCE, TITAN = "NVIDIA GeForce RTX 4090", "TITAN V"
# The lists in NVIDIA's own libraries.
BRANCHES = frozenset({535, 550, 570, 575, 580, 590})
BRANDS = frozenset({1, 2, 7, 8, 9, 10, 11, 12, 13, 14})
FULL = Note((13, 1), BRANCHES, BRANDS)
OURS = "/usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03"
PLAN = Plan(
    libraries=(
        CachedLibrary("libcuda.so.1", OURS, Arch.X86_64),
        CachedLibrary("libcuda.so", OURS, Arch.X86_64),
    )
)


def host(driver: str = "535.261.03", cuda: str = "12.2", models: Iterable[str] = (H100,)) -> Host:
    gpus = [Gpu(n, n, "", "", model) for n, model in enumerate(models)]
    return host_of(driver, cuda, gpus)


@pytest.mark.parametrize(
    ("version", "says", "has", "fits"),
    [
        # From its note: newer CUDA, a listed branch, a listed type of GPU.
        ("590.44.01", FULL, host(), True),
        ("590.44.01", FULL, host("590.44.01", "13.1"), False),
        ("590.44.01", FULL, host("590.48.01", "13.1"), False),
        ("590.44.01", FULL, host("610.11.01", "13.3"), False),
        ("590.44.01", FULL, host("565.57.01", "12.7"), False),
        ("590.44.01", FULL, host(models=[A6000]), True),
        ("590.44.01", FULL, host(models=[GEFORCE]), False),
        ("590.44.01", FULL, host(models=[H100, TITAN]), False),
        ("590.44.01", FULL, host(models=[]), True),
        ("590.44.01", Note((13, 1), BRANCHES, BRANDS | {5, 15}), host(models=[GEFORCE]), True),
        # Minor versions are compared as numbers.
        ("575.57.08", Note((12, 10)), host(cuda="12.9"), True),
        ("575.57.08", Note((12, 9)), host(cuda="12.10"), False),
        # Missing lists allow anything, as on embedded boards.
        ("540.1.0", Note((13, 2)), host(models=[GEFORCE]), True),
        # The host's CUDA version is unknown: the branch decides.
        ("590.44.01", FULL, host(cuda=""), True),
        ("535.104.05", Note((12, 2), BRANCHES, BRANDS), host(cuda=""), False),
        # No note: the branch decides, but not on GeForce GPUs.
        ("550.54.15", None, host(), True),
        ("535.309.01", None, host(), False),
        ("525.60.13", None, host(), False),
        ("1000.1.1", None, host("999.1.1"), True),
        ("550.54.15", None, host(models=[GEFORCE]), False),
        ("550.54.15", None, host(models=["Tesla T4"]), True),
    ],
)
def test_newer_library_comes_first_where_it_works(
    version: str, says: Note | None, has: Host, fits: bool
) -> None:
    candidate = Candidate("/usr/local/cuda-13.1/compat", version, says)
    chosen, why = choose([candidate], has)
    assert (chosen is not None) is fits, why
    assert version in why


def test_newest_of_several_that_fits_is_taken() -> None:
    candidates = [
        Candidate("/a", "550.54.15"),
        Candidate("/b", "590.44.01", Note((13, 1), frozenset({550}))),
        Candidate("/c", "575.57.08"),
    ]
    chosen, _ = choose(candidates, host())
    assert chosen is candidates[2]
    chosen, why = choose(candidates, host("610.1.1", "13.3"))
    assert chosen is None
    assert all(candidate.version in why for candidate in candidates)


# Real files


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build libraries once, which tests copy."""
    directory = tmp_path_factory.mktemp("libcuda")
    text = note(branches=sorted(BRANCHES), brands=sorted(BRANDS))
    build_libcuda(directory / "full", text)
    build_libcuda(directory / "loaded", text, loaded=True)
    build_libcuda(directory / "wide", text, align=8)
    build_libcuda(directory / "unpadded", text, align=1)
    build_libcuda(directory / "none", None)
    build_libcuda(directory / "other's", note("99.0"), owner="Somebody else")
    build_libcuda(directory / "no JSON", b"{[")
    build_libcuda(directory / "nonsense", note(cuda="soon"))
    build_libcuda(directory / "no list", note(branches="535"))
    build_libcuda(directory / "no numbers", note(branches=[True]))
    build_libcuda(directory / "narrow", text, bits=32)
    build_libcuda(directory / "jit", None, soname="libnvidia-ptxjitcompiler.so.1")
    build_libcuda(directory / "libc", None, soname="libc.so.6")
    return directory


class Image:
    """An image with forward compatibility directories."""

    def __init__(self, root: Path, made: Path) -> None:
        self.root = root
        self._made = made
        root.mkdir()

    def add(self, kind: str = "full", name: str = "libcuda.so.590.44.01",
            directory: str = "usr/local/cuda/compat") -> Path:  # fmt: skip
        place = self.root / directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((self._made / kind).read_bytes())
        return place

    def find(
        self, has: Host | None = None, mounts: Iterable[dict[str, Any]] = (), plan: Plan = PLAN
    ) -> Compat:
        with Rootfs.open(str(self.root)) as rootfs:
            layout = read_layout(rootfs, [Arch.X86_64], mounts)
            return find_compat(rootfs, plan, layout, has or host(), Arch.X86_64)


@pytest.fixture
def image(tmp_path: Path, made: Path) -> Image:
    return Image(tmp_path / "rootfs", made)


@pytest.mark.parametrize("kind", ["full", "loaded", "wide", "unpadded"])
def test_note_is_read_wherever_the_linker_put_it(image: Image, kind: str) -> None:
    image.add(kind, "libcuda.so.500.1.1")  # too old according to its name
    found = image.find()
    assert (found.directory, found.version) == ("/usr/local/cuda/compat", "500.1.1")
    assert "CUDA 13.1" in found.why
    assert image.find(host("565.1.1", "12.7")).directory == ""


@pytest.mark.parametrize("kind", ["none", "other's"])
def test_library_without_a_note_is_judged_by_its_name(image: Image, kind: str) -> None:
    image.add(kind, "libcuda.so.550.54.15")
    assert image.find().directory == "/usr/local/cuda/compat"
    assert image.find(host("550.1.1")).directory == ""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no JSON", "not valid JSON"),
        ("nonsense", "no sense"),
        ("no list", "no sense"),
        ("no numbers", "no sense"),
        ("narrow", "architecture"),
    ],
)
def test_library_that_makes_no_sense_is_left_alone(image: Image, kind: str, says: str) -> None:
    image.add(kind)
    found = image.find()
    assert found.directory == ""
    assert says in found.why


def test_all_libraries_of_the_directory_come_first_by_their_sonames(image: Image) -> None:
    image.add()
    image.add("jit", "libnvidia-ptxjitcompiler.so.590.44.01")
    image.add("libc", "libnvidia-evil.so.1")
    image.add("jit", "libfoo.so.1")
    (image.root / "usr/local/cuda/compat/libcuda.so.1").symlink_to("libcuda.so.590.44.01")
    plan = with_compat(PLAN, image.find())
    assert plan.first_directories == ("/usr/local/cuda/compat",)
    first: dict[str, str] = {}
    for library in plan.libraries:
        first.setdefault(library.soname, library.path)
    assert first == {
        "libcuda.so.1": "/usr/local/cuda/compat/libcuda.so.590.44.01",
        "libcuda.so": "/usr/local/cuda/compat/libcuda.so.590.44.01",
        "libnvidia-ptxjitcompiler.so.1": (
            "/usr/local/cuda/compat/libnvidia-ptxjitcompiler.so.590.44.01"
        ),
    }


def test_nothing_is_mounted_or_linked_for_it(image: Image) -> None:
    image.add()
    plan = with_compat(PLAN, image.find())
    assert (plan.mounts, plan.links, plan.files, plan.environment) == ((), (), (), ())


def test_directory_is_where_its_links_lead(image: Image) -> None:
    image.add(directory="usr/local/cuda-13.1/compat")
    (image.root / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    (image.root / "etc/alternatives").mkdir(parents=True)
    (image.root / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-13.1")
    assert image.find().directory == "/usr/local/cuda-13.1/compat"


def test_versioned_directories_count_if_there_is_no_other(image: Image) -> None:
    image.add(directory="usr/local/cuda-13.1/compat")
    image.add("none", "libcuda.so.550.54.15", "usr/local/cuda-12.4/compat")
    image.add(directory="usr/local/cuda-other/compat")
    assert image.find().directory == "/usr/local/cuda-13.1/compat"
    assert image.find(host("545.1.1", "12.3")).directory == "/usr/local/cuda-12.4/compat"
    image.add("none", "libcuda.so.535.1.1")
    assert image.find().directory == "", "the image's own choice is older"


def test_image_without_any_says_nothing(image: Image) -> None:
    assert image.find() == Compat()
    (image.root / "usr/local/cuda/compat").mkdir(parents=True)
    assert image.find() == Compat()


def test_container_without_libcuda_gets_none_of_the_image_s(image: Image) -> None:
    image.add()
    assert image.find(plan=Plan()) == Compat()


def test_two_libraries_are_one_too_many(image: Image) -> None:
    image.add()
    image.add(name="libcuda.so.575.57.08")
    found = image.find()
    assert found.directory == ""
    assert "2 files" in found.why


def test_volume_over_the_directory_hides_what_was_read(image: Image) -> None:
    image.add()
    volume = {"destination": "/usr/local/cuda", "type": "bind", "source": "/srv"}
    found = image.find(mounts=[volume])
    assert found.directory == ""
    assert "mounted over" in found.why


LIBRARY = "/usr/local/cuda/compat/libcuda.so.590.44.01"
FINE = "../host/compat"  # a valid one on the host, to which links of the image lead


def to_the_host(below: str) -> Make:
    return lambda path: os.symlink(f"{path.partition('/rootfs/')[0]}/host{below}", path)


HOSTILE: dict[str, tuple[str | None, dict[str, Make]]] = {
    "link out of the image": (FINE, {"/usr/local/cuda/compat": to_the_host("/compat")}),
    "link upwards": (FINE, {"/usr/local/cuda/compat": to("../../../../host/compat")}),
    "library outside": (FINE, {LIBRARY: to_the_host("/compat/libcuda.so.590.44.01")}),
    "cycle": (None, {"/usr/local/cuda/compat": to("compat")}),
    "FIFO": (None, {LIBRARY: os.mkfifo}),
    "FIFO for a directory": (None, {"/usr/local/cuda/compat": os.mkfifo}),
    "device": (None, {LIBRARY: device}),
    "giant": (None, {LIBRARY: lambda path: subprocess.run(["truncate", "-s1T", path], check=True)}),
    "many names": (
        "usr/local/cuda/compat",
        {f"/usr/local/cuda/compat/lib{number}": b"" for number in range(200)},
    ),
    "many versions": (
        None,
        {f"/usr/local/cuda-{number % 999}.{number // 999}": os.mkdir for number in range(1200)},
    ),
    "newline": ("opt/x\n/lib", {"/usr/local/cuda/compat": to("/opt/x\n/lib")}),
    "into procfs": ("proc/1/compat", {"/usr/local/cuda/compat": to("/proc/1/compat")}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_image_gets_the_driver_s_and_nothing_is_followed(image: Image, name: str) -> None:
    fine, files = HOSTILE[name]
    if fine:
        image.add(directory=fine)
    fill(str(image.root), files)
    found = image.find()
    assert (found.directory, found.libraries) == ("", ())
    assert "\n" not in found.why


@given(st.data())
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_bytes_of_a_library_may_be_wrong(image: Image, made: Path, data: st.DataObject) -> None:
    content = bytearray((made / "full").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        # Headers are at both ends of a file.
        where = data.draw(
            st.one_of(st.integers(0, 512), st.integers(1, 2500), st.integers(1, len(content) - 1))
        )
        content[-where if data.draw(st.booleans()) and where else where % len(content)] = data.draw(
            st.integers(0, 255)
        )
    image.add().write_bytes(content[: data.draw(st.integers(0, len(content)))])
    assert image.find().directory in {"", "/usr/local/cuda/compat"}
    image.add().write_bytes(content)
    assert image.find().directory in {"", "/usr/local/cuda/compat"}
