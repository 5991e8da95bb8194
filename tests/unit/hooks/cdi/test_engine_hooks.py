"""The effects of a CDI spec's hooks after an engine has applied it to an OCI spec."""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hooks import engine
from hooks.cdi import nvidia_hooks
from hooks.edits.applied import driver_mounts, without
from hooks.errors import MalformedSpec
from hooks.image.rootfs import Rootfs
from hooks.targets import Target
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Elves, Node, nvml_gpu
from tests.unit.hooks.image.images import alpine

HOME = f"/{MULTIARCH}"
PROGRAM = "/usr/bin/nvidia-cdi-hook"
FOLDER = ("--folder", HOME)


def call(*words: str) -> dict[str, Any]:
    return {"path": PROGRAM, "args": ["nvidia-cdi-hook", *words]}


def bind(source: object, where: str) -> dict[str, Any]:
    return {
        "source": str(source), "destination": where, "type": "bind", "options": ["ro", "rbind"],
    }  # fmt: skip


def applied(node: Node, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a container's spec with the driver's libcuda and some hooks from its engine."""
    library = f"{HOME}/libcuda.so.{VERSION}"
    return {
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "user": {"uid": 0, "gid": 0}},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            bind(f"{node.driver}{library}", library),
        ],
        "linux": {"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]},
        "hooks": {"createContainer": list(calls)},
        **more,
    }


Inject = Callable[[dict[str, Any]], engine.Injection]


@pytest.fixture
def inject(node: Node, rootfs: Path) -> Inject:
    """Inject as the worker does for a container without a request of its own."""

    def inject(spec: dict[str, Any]) -> engine.Injection:
        before = copy.deepcopy(spec)
        request = engine.read_request(spec)
        assert not engine.needs_inventory(request, node.config)
        verdict = engine.judge(spec, request, node.config)
        done = engine.inject(
            spec, verdict.allowed, None,
            engine.RootfsTarget(str(rootfs), str(node.base / "staging")),
            config=node.config, verdict=verdict,
        )  # fmt: skip
        assert spec == before
        return done

    return inject


def cached(rootfs: Path) -> dict[str, str]:
    """Return the first path of each name in the image's cache, as glibc's ldconfig prints it."""
    command = ["ldconfig", "-p", "-C", str(rootfs / "etc/ld.so.cache")]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines()[1:]:
        if " => " in line:
            name, _, path = line.partition(" => ")
            found.setdefault(name.split()[0], path)
    return found


def test_hooks_are_done_and_nothing_is_given(node: Node, rootfs: Path, inject: Inject) -> None:
    spec = applied(
        node, call("create-symlinks", "--link", f"libcuda.so.1::{HOME}/libcuda.so"),
        call("update-ldcache", *FOLDER), call("disable-device-node-modification"),
    )  # fmt: skip
    (node.proc / "driver/nvidia/params").write_text("ModifyDeviceFiles: 1\n")
    done = inject(spec)
    assert done.spec == spec | {"hooks": {"createContainer": []}}
    assert os.readlink(rootfs / f"{MULTIARCH}/libcuda.so") == "libcuda.so.1"
    assert os.readlink(rootfs / f"{MULTIARCH}/libcuda.so.1") == f"libcuda.so.{VERSION}"
    library = f"{HOME}/libcuda.so.{VERSION}"
    found = cached(rootfs)
    assert found["libcuda.so.1"] == found["libcuda.so"] == library
    assert [file["path"] for file in done.record["proc_files"]] == ["/proc/driver/nvidia/params"]
    assert done.record["edits"]["devices"] == done.record["edits"]["mounts"] == []
    assert done.record["grant"] is None
    hooks = done.record["spec_hooks"]
    assert [hook["command"] for hook in hooks["done"]] == [
        f"{PROGRAM} create-symlinks", f"{PROGRAM} update-ldcache",
        f"{PROGRAM} disable-device-node-modification",
    ]  # fmt: skip
    assert not hooks["left"]
    assert engine.apply_to_process({"args": ["x"]}, done.record) == {"args": ["x"]}


def test_second_container_of_one_root_changes_nothing(
    node: Node, rootfs: Path, inject: Inject
) -> None:
    spec = applied(node, call("update-ldcache", *FOLDER), call("create-soname-symlinks", *FOLDER))
    inject(spec)
    first = (rootfs / "etc/ld.so.cache").read_bytes()
    done = inject(spec)
    assert (rootfs / "etc/ld.so.cache").read_bytes() == first
    assert done.record["written"] == []


def test_links_of_sonames_alone_are_no_entries_of_the_cache(
    node: Node, rootfs: Path, inject: Inject
) -> None:
    inject(applied(node, call("create-soname-symlinks", *FOLDER)))
    assert os.readlink(rootfs / f"{MULTIARCH}/libcuda.so.1") == f"libcuda.so.{VERSION}"
    assert not (rootfs / "etc/ld.so.cache").exists()


def test_image_with_musl_finds_the_folders(node: Node, rootfs: Path, inject: Inject) -> None:
    subprocess.run(["find", str(rootfs), "-mindepth", "1", "-delete"], check=True)
    alpine(str(rootfs))
    inject(applied(node, call("update-ldcache", *FOLDER)))
    assert HOME in (rootfs / "etc/ld-musl-x86_64.path").read_text().splitlines()
    assert os.readlink(rootfs / f"{MULTIARCH}/libcuda.so.1") == f"libcuda.so.{VERSION}"


@pytest.mark.parametrize("place", ["", "/usr/local/cuda/compat_orin"])
def test_newer_libcuda_of_the_image_comes_first_where_the_hook_says(
    node: Node, rootfs: Path, inject: Inject, elves: Elves, place: str
) -> None:
    newer = f"{place or '/usr/local/cuda/compat'}/libcuda.so.999.1"
    elves.write(rootfs / newer[1:], "libcuda.so.1")
    more = [f"--cuda-compat-container-root={place}"] if place else []
    compat = call("enable-cuda-compat", f"--host-driver-version={VERSION}", *more)
    done = inject(applied(node, call("update-ldcache", *FOLDER), compat))
    assert cached(rootfs)["libcuda.so.1"] == newer
    assert done.record["cuda_compat"]["directory"] == os.path.dirname(newer)

    (rootfs / "etc/ld.so.cache").unlink()
    node.config = replace(node.config, cuda_compat=False)
    inject(applied(node, call("update-ldcache", *FOLDER), compat))
    assert cached(rootfs)["libcuda.so.1"] == f"{HOME}/libcuda.so.{VERSION}"


def test_nothing_but_a_regular_file_of_a_mount_is_opened(
    node: Node, rootfs: Path, inject: Inject, tmp_path: Path
) -> None:
    """A spec does not tell the engine's mounts from a tenant's volumes."""
    volume = tmp_path / "volume"
    volume.mkdir()
    os.mkfifo(volume / "liba.so.1")
    os.mkfifo(volume / "libb.so.1")
    (volume / "libc.so.1").symlink_to("liba.so.1")
    (volume / "libd.so.1").write_bytes(b"no library")
    (volume / "libe.so.1").symlink_to("libe.so.1")
    # A FIFO with a reader can be opened for writing without blocking.
    spec = applied(node, call("update-ldcache", "--folder", "/vol", "--folder", "/more/sub"))
    spec["mounts"] += [
        bind(volume, "/more"), bind(volume / "libb.so.1", "/vol/libb.so.1"),
        bind(volume, "/more/sub"), bind("/nowhere", "/vol/libx.so"),
        bind("/zero\0byte", "/vol/libn.so"), bind("/zero\0byte", "/more/sub"),
        {"destination": "/vol/liby.so", "type": "bind", "source": "relative"},
        {"destination": "/vol/libz.so", "type": "tmpfs", "source": "tmpfs"},
    ]  # fmt: skip
    done = inject(spec)
    for name in ("liba.so.1", "libb.so.1"):
        with pytest.raises(OSError, match="No such device or address"):
            os.open(volume / name, os.O_WRONLY | os.O_NONBLOCK)
    assert done.record["edits"]["libraries"] == []
    assert sorted(os.listdir(volume)) == [f"lib{each}.so.1" for each in "abcde"]


def test_no_link_of_a_mount_is_followed_to_the_host(
    node: Node, elves: Elves, inject: Inject, tmp_path: Path
) -> None:
    host, volume = tmp_path / "host", tmp_path / "volume"
    elves.write(host / "libhost.so.1", "libhost.so.1")
    elves.write(volume / "real/liba.so.1.2", "liba.so.1")
    (volume / "out").symlink_to(host)
    (volume / "up").symlink_to("../host")
    (volume / "in").symlink_to("real")
    (volume / "real/libb.so.1").symlink_to(host / "libhost.so.1")
    (volume / "real/liba.so").symlink_to("liba.so.1.2")
    folders = [word for each in ("out", "up", "in") for word in ("--folder", f"/vol/{each}")]
    spec = applied(node, call("update-ldcache", *folders))
    spec["mounts"] += [bind(volume, "/vol")]
    libraries = inject(spec).record["edits"]["libraries"]
    assert [each["soname"] for each in libraries] == ["liba.so.1"]


def test_no_more_names_of_a_volume_are_read_than_of_an_image(
    node: Node, elves: Elves, inject: Inject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for volume in (few, many):
        elves.write(volume / f"lib{volume.name}.so.1", f"lib{volume.name}.so.1")
    (many / "more").touch()
    (many / "still-more").touch()
    spec = applied(node, call("update-ldcache", "--folder", "/few", "--folder", "/many"))
    spec["mounts"] += [bind(few, "/few"), bind(many, "/many")]
    monkeypatch.setattr(nvidia_hooks, "MOST_NAMES", 2)
    sonames = [each["soname"] for each in inject(spec).record["edits"]["libraries"]]
    assert sonames == ["libfew.so.1"]


def test_path_of_a_hook_does_not_lead_out_of_the_image(
    node: Node, rootfs: Path, inject: Inject, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = rootfs / str(outside)[1:]
    inside.mkdir(parents=True)
    (rootfs / "opt").symlink_to(outside)
    (rootfs / "up").symlink_to("../../../../../../../../../.." + str(outside))
    inject(
        applied(
            node, call("create-symlinks", "--link", "a::/opt/x", "--link", "a::/up/y"),
            call("create-symlinks", "--link", "../../../../../etc/passwd::/../../z"),
        )
    )  # fmt: skip
    assert not list(outside.iterdir())
    assert sorted(path.name for path in inside.iterdir()) == ["x", "y"]
    assert os.readlink(rootfs / "z") == "/etc/passwd"


def test_layer_of_an_image_has_no_files_of_hooks_beside_a_request(node: Node) -> None:
    inventory = node.take_inventory(nvml_gpu(0))
    spec = applied(node, call("chmod"))
    spec["process"]["env"] = ["NVIDIA_VISIBLE_DEVICES=0"]
    request = engine.read_request(spec)
    assert engine.placement_key(spec, request, inventory, node.config) is None
    del spec["hooks"]
    assert engine.placement_key(spec, request, inventory, node.config) is not None


DRIVER = ["ro", "nosuid", "nodev", "rbind", "rprivate"]


def mounted(spec: dict[str, Any], source: object, where: str, options: list[str]) -> dict[str, Any]:
    """Return a spec with its last mount, the driver's, in another form."""
    last = {"source": str(source), "destination": where, "type": "bind", "options": options}
    return spec | {"mounts": [*spec["mounts"][:-1], last]}


@pytest.mark.parametrize(
    ("options", "is_alike"),
    [
        (DRIVER, True),
        (["ro", "nosuid", "nodev", "bind"], True),
        (["ro", "nosuid", "nodev"], False),
        (["rw", "nosuid", "nodev", "bind"], False),
        (["ro", "nosuid", "nodev", "bind", "noexec"], False),
        (["ro", "nosuid", "nodev", "rbind", "rshared"], False),
        (["ro", "bind"], False),
        ("ro", False),
    ],
    ids=str,
)
def test_mount_of_the_driver_is_known_by_its_options(
    node: Node, options: list[str], is_alike: bool
) -> None:
    library = f"{HOME}/libcuda.so.{VERSION}"
    source = f"{node.driver}{library}"
    spec = mounted(applied(node, call("chmod")), source, library, options)
    assert bool(driver_mounts(spec, {source: ()})) is is_alike
    assert not driver_mounts(spec, {})  # of no driver that was observed
    assert not driver_mounts(spec | {"hooks": {}}, {source: ()})  # by no engine
    there = driver_mounts(spec, {source: ()})
    assert without(spec["mounts"], there) == spec["mounts"][: -1 if is_alike else None]
    assert without(spec["mounts"], ()) == spec["mounts"]


@pytest.mark.parametrize("options", [DRIVER, ["rw", "bind"]], ids=["driver", "volume"])
@pytest.mark.parametrize("in_layer", [False, True], ids=["rootfs", "layer"])
def test_empty_file_of_the_image_does_not_hide_a_library_that_the_engine_mounts(
    node: Node, rootfs: Path, options: list[str], in_layer: bool
) -> None:
    """A mount that may be a tenant's volume is not repeated elsewhere."""
    inventory = node.take_inventory(nvml_gpu(0))
    library = f"{HOME}/libcuda.so.{VERSION}"
    spec = applied(node, call("update-ldcache", *FOLDER))
    spec = mounted(spec, f"{node.driver}{library}", library, options)
    spec["process"]["env"].append("LD_LIBRARY_PATH=/opt/lib")
    (rootfs / "opt/lib").mkdir(parents=True)
    (rootfs / "opt/lib/libcuda.so.1").touch()
    request, staging = engine.read_request(spec), str(node.base / "staging")
    target: Target = engine.RootfsTarget(str(rootfs), staging)
    if in_layer:
        with Rootfs.open(str(rootfs)) as layer:
            prepared, files = engine.prepare(
                spec, request, inventory, layer, rootfs="/rootfs", config=node.config
            )
        # They can be in the layer; here they stay mounts.
        covers = {"/opt/lib/libcuda.so.1", library} if options is DRIVER else set()
        assert {file.path for file in files} == covers
        target = engine.LayerTarget(prepared, "/rootfs", staging)
    done = engine.inject(spec, request, inventory, target, config=node.config)
    cover = {**spec["mounts"][-1], "destination": "/opt/lib/libcuda.so.1"}
    assert done.spec["mounts"] == [*spec["mounts"], *([cover] if options is DRIVER else [])]


def test_layer_depends_on_all_that_an_engine_has_applied(node: Node, tmp_path: Path) -> None:
    inventory = node.take_inventory(nvml_gpu(0))
    library = f"{HOME}/libcuda.so.{VERSION}"
    source = f"{node.driver}{library}"
    assert inventory.files is not None
    assert source in inventory.files

    def key(spec: dict[str, Any]) -> bytes | None:
        return engine.placement_key(spec, engine.read_request(spec), inventory, node.config)

    def spec(*calls: dict[str, Any]) -> dict[str, Any]:
        made = applied(node, *calls or (call("update-ldcache", *FOLDER),))
        return mounted(made, source, library, DRIVER)

    other = {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}
    keys = [
        key(each)
        for each in (
            spec(),
            spec() | {"mounts": spec()["mounts"][:-1]},
            spec() | {"linux": {"devices": [other]}},
            spec(call("update-ldcache", *FOLDER, "--folder", "/opt")),
            spec(call("create-soname-symlinks", *FOLDER)),
            mounted(spec(), source, f"{HOME}/libcuda.so.1", DRIVER),
        )
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(spec()) == keys[0]
    # What a hook would find in a volume is not known to be the same in the next container.
    for where in (HOME, "/usr/lib", "/", f"{HOME}/libtheirs.so"):
        with_volume = spec()
        with_volume["mounts"].append(bind(tmp_path, where))
        assert key(with_volume) is None
    beside = spec()
    beside["mounts"].append(bind(tmp_path, "/data"))
    assert key(beside) is not None


def test_hooks_beside_a_request_are_done_once(node: Node, rootfs: Path) -> None:
    """The engine has applied a spec for a container that also has a request for us."""
    inventory = node.take_inventory(nvml_gpu(0))
    link = f"libcuda.so.1::{HOME}/libcuda.so"
    spec = applied(
        node, call("create-symlinks", "--link", link), call("update-ldcache", *FOLDER),
        annotations={"cdi.k8s.io/plugin": "nvidia.com/gpu=0"},
    )  # fmt: skip
    done = engine.inject(
        spec, engine.read_request(spec), inventory,
        engine.RootfsTarget(str(rootfs), str(node.base / "staging")), config=node.config,
    )  # fmt: skip
    assert not any(done.spec["hooks"].values())
    places = [mount["destination"] for mount in done.spec["mounts"]]
    assert len(places) == len(set(places))
    there = done.record["in_spec"]
    assert there["mounts"] == [f"{HOME}/libcuda.so.{VERSION}"]
    assert there["devices"] == ["/dev/nvidia0"]
    assert os.readlink(rootfs / f"{MULTIARCH}/libcuda.so") == "libcuda.so.1"


@pytest.mark.parametrize(
    "part",
    [
        {"mounts": ["x"]}, {"mounts": [{"options": "bind", "destination": "/x"}]},
        {"linux": {"devices": ["x"]}}, {"linux": []}, {"hooks": {"prestart": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_spec_of_the_wrong_shape_is_said(node: Node, inject: Inject, part: dict[str, Any]) -> None:
    with raises(MalformedSpec):
        inject(applied(node, call("update-ldcache", *FOLDER)) | part)
