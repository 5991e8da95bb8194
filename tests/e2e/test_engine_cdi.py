"""Containers whose engine has applied NVIDIA's CDI spec: the shim does the hooks' work itself.

containerd 2, CRI-O and Docker do so for ``--device``, for a kubelet's device plugin and for DRA
drivers; NRI plugins do so as well. The shim sees nodes, mounts and hooks in the spec, and no
request.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from hooks.words import end_of
from integration.simulated import SimulatedNode
from tests.conftest import RUNTIME
from tests.harness import engine_cdi
from tests.harness.containerds import nothing_left
from tests.harness.engine_cdi import FOLDERS, apply, trap
from tests.harness.hostile import Ground, Seen
from tests.harness.low_level import crun_for_this_host
from tests.harness.nvshim import nvshim
from tests.harness.runtime import OURS
from tools.containerd import PrivateContainerd
from tools.images import glibc, unpack
from tools.parts import Parts

pytestmark = pytest.mark.skipif(
    RUNTIME != OURS, reason="containerd's own shim leaves hooks to the runtime"
)

PROFILE: Final = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
PARAMETERS: Final = "/proc/driver/nvidia/params"
MAPPED: Final = 200000
PRELOADED: Final = "LD_PRELOAD=./evil.so"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def ground(
    session_containerd: PrivateContainerd,
    two_gpus: SimulatedNode,
    shim_config: str,
    workshop: str,
) -> Iterator[Ground]:
    """Return a place that runs specs of every kind in one shim, on a node with two GPUs."""
    with open(shim_config, encoding="utf-8") as file:
        before = file.read()
    with open(two_gpus.config_path, encoding="utf-8") as file:
        ours = file.read()
    with open(shim_config, "w", encoding="utf-8") as file:
        file.write(ours)
    directory = f"{workshop}/engine-cdi"
    os.makedirs(directory)
    with (
        nothing_left(session_containerd),
        Ground(session_containerd, two_gpus, directory) as made,
    ):
        yield made
    with open(shim_config, "w", encoding="utf-8") as file:
        file.write(before)


@pytest.fixture(scope="module")
def low_levels(parts: Parts, workshop: str) -> dict[str, str]:
    directory = f"{workshop}/engine-cdi-low-level"
    os.makedirs(directory)
    return {"runc": parts.runc, "crun": crun_for_this_host(directory, parts.crun)}


def every_link(node: SimulatedNode) -> dict[str, str]:
    """Return the links that the real hooks make: the file that each path ends at."""
    found = {}
    for texts in engine_cdi.links(node).values():
        for text in texts:
            target, _, path = text.rpartition("::")
            found[path] = os.path.normpath(os.path.join(os.path.dirname(path), target))
    # ldconfig and create-soname-symlinks create the soname links; the driver's packages contain the
    # same links, created by the same program.
    for _, where in engine_cdi.mounts(node):
        directory, name = os.path.split(where)
        if directory not in FOLDERS or ".so." not in name:
            continue
        beside = f"{node.driver_root}{directory}"
        for link in os.listdir(beside):
            if (
                link != name
                and ".so." in link
                and os.path.realpath(f"{beside}/{link}") == f"{beside}/{name}"
            ):
                found.setdefault(f"{directory}/{link}", where)
    return {path: end_of(path, found) for path in found}


# Programs that need only the image's libc.
LOADED: Final = ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1")


LOOK: Final = f"""
ls -l /dev/nvidia* >/dev/null && echo nodes
for link in $LINKS; do echo "link $link $(readlink -f $link)"; done
for name in $NAMES; do probe dlopen $name >/dev/null && echo "found $name"; done
ldconfig -p | while read -r name rest; do echo "cache $name $rest"; done
grep -q EGLVisible {PROFILE} && echo profile
"""


def seen(output: str) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for line in output.splitlines():
        word, *rest = line.split()
        found.setdefault(word, []).append(rest)
    return found


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize(
    ("program", "stage", "installed"),
    [
        ("nvidia-cdi-hook", "createContainer", True),
        ("nvidia-cdi-hook", "createContainer", False),
        ("nvidia-ctk", "createRuntime", True),
        ("nvidia-cdi-hook", "startContainer", True),
    ],
)
def test_hooks_of_a_spec_that_the_engine_applied_are_done_and_none_runs(
    ground: Ground,
    low_levels: dict[str, str],
    low_level: str,
    program: str,
    stage: str,
    installed: bool,
    tmp_path: Path,
) -> None:
    node = ground.node
    path, log = trap(tmp_path, program)
    if not installed:
        os.unlink(path)
    links = every_link(node)
    parameters: list[str] = []

    def read_cover(_: int) -> None:
        bundles = f"{ground.containerd.directory}/state/io.containerd.runtime.v2.task"
        covers = Path(bundles).glob("*/*/nvidia/proc-file-*")
        parameters.extend(cover.read_text() for cover in covers)

    env = (
        f"LINKS={' '.join(links)}",
        f"NAMES={' '.join(LOADED)}",
        PRELOADED,
        "LD_LIBRARY_PATH=/opt",
    )
    image = ground.image()
    (Path(image) / "opt").mkdir()
    (Path(image) / "opt/libcuda.so.1").touch()  # of a commit: the loader stops there
    done = ground.run(
        image, "sh", "-c", LOOK, env=env, low_level=low_levels[low_level],
        edit=partial(apply, node=node, program=path, stage=stage), while_created=read_cover,
    )  # fmt: skip
    assert not done.refused
    assert not log.exists()
    assert not any(done.spec["hooks"].values())
    told = seen(done.output)
    assert "nodes" in told, done.output
    assert dict(told["link"]) == links
    assert tuple(name for (name,) in told["found"]) == LOADED
    cached = {line[0]: line[-1] for line in told["cache"] if "=>" in line}
    in_folders = [path for path in links if os.path.dirname(path) in FOLDERS]
    assert {path.rpartition("/")[2] for path in in_folders} <= cached.keys()
    assert "profile" in told
    # This kernel has no such module: the cover's source exists, and the shim tried.
    (covered,) = done.record["proc_files"]
    assert covered["path"] == PARAMETERS
    assert "ModifyDeviceFiles: 0\n" in "".join(parameters)
    # Nothing was added twice, and only the hooks were removed.
    places = [mount["destination"] for mount in done.spec["mounts"]]
    assert len(places) == len(set(places))
    assert {where for _, where in engine_cdi.mounts(node)} <= set(places)


LAYERED: Final = ("index=off",)  # the option with which containerd mounts an image


def not_of_driver(node: SimulatedNode) -> set[str]:
    documentation = f"nvidia-application-profiles-{node.driver_version}-key-documentation"
    return {"/usr/bin/nvidia-bug-report.sh", f"/usr/share/nvidia/{documentation}"}


def without_second_gpu(spec: dict[str, Any]) -> None:
    nodes = spec["linux"]["devices"]
    spec["linux"]["devices"] = [node for node in nodes if node["path"] != "/dev/nvidia1"]


def test_files_of_the_driver_that_the_engine_mounts_are_in_a_layer_of_the_image(
    ground: Ground, tmp_path: Path
) -> None:
    node = ground.node
    path, log = trap(tmp_path)
    links = every_link(node)
    wanted = {where for _, where in engine_cdi.mounts(node)}
    env = (f"LINKS={' '.join(links)}", f"NAMES={' '.join(LOADED)}")

    def run(change: Edit = lambda _: None) -> Seen:
        def edit(spec: dict[str, Any]) -> None:
            apply(spec, node, path)
            change(spec)

        command = f"{LOOK}\ncat {PROFILE}"
        return ground.run(
            ground.image(), "sh", "-c", command, env=env, edit=edit, mount_options=LAYERED
        )

    first, second, other = run(), run(), run(without_second_gpu)
    for done in (first, second, other):
        assert not done.refused
        told = seen(done.output)
        assert dict(told["link"]) == links
        assert tuple(name for (name,) in told["found"]) == LOADED
        layered = {each["destination"] for each in done.record["driver_layer"]}
        # What no inventory looks for stays as it is.
        assert wanted - layered == not_of_driver(node)
        places = [mount["destination"] for mount in done.spec["mounts"]]
        assert wanted.intersection(places) == wanted - layered
        assert layered.isdisjoint(line.split()[4] for line in done.mounts.splitlines())
        assert done.record["identity"]["driver"] == node.driver_version
    assert first.output == second.output
    assert first.output != other.output  # the profile shows EGL its one GPU
    assert not log.exists()


def test_volume_among_the_driver_s_libraries_keeps_the_engines_mounts(
    ground: Ground, tmp_path: Path
) -> None:
    path, log = trap(tmp_path)
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "theirs").touch()

    def edit(spec: dict[str, Any]) -> None:
        options = ["rbind", "rprivate", "rw"]  # the runtime makes mount points
        spec["mounts"].append(
            {"source": str(volume), "destination": FOLDERS[1], "type": "bind", "options": options}
        )
        apply(spec, ground.node, path)

    done = ground.run(
        ground.image(), "ls", FOLDERS[1], env=(), edit=edit, mount_options=LAYERED
    )  # fmt: skip
    assert not done.refused
    assert done.record["driver_layer"] == []
    places = {mount["destination"] for mount in done.spec["mounts"]}
    assert {where for _, where in engine_cdi.mounts(ground.node)} <= places
    assert not log.exists()


def read_only(spec: dict[str, Any]) -> None:
    spec["root"]["readonly"] = True


def mapped(spec: dict[str, Any]) -> None:
    """Give it a user namespace."""
    ids = [{"containerID": 0, "hostID": MAPPED, "size": 65536}]
    spec["linux"] |= {"uidMappings": ids, "gidMappings": ids}
    spec["linux"]["namespaces"].append({"type": "user"})
    del spec["linux"]["devices"]  # runc mounts the host's, which a simulated node does not have


@pytest.mark.parametrize("change", [read_only, mapped], ids=lambda change: str(change.__name__))
def test_hooks_are_done_for_other_kinds_of_containers_too(
    ground: Ground, change: Edit, tmp_path: Path
) -> None:
    node = ground.node
    path, log = trap(tmp_path)

    def edit(spec: dict[str, Any]) -> None:
        apply(spec, node, path)
        change(spec)

    rootfs = ""
    if change is mapped:
        os.chmod(tmp_path, 0o755)
        rootfs = unpack(glibc().tree, str(tmp_path / "rootfs"))
        subprocess.run(["chown", "--recursive", f"{MAPPED}:{MAPPED}", rootfs], check=True)
    env = ("LINKS=", f"NAMES={' '.join(LOADED)}")
    done = ground.run(ground.image(), "sh", "-c", LOOK, env=env, edit=edit, rootfs=rootfs)
    told = seen(done.output)
    assert not done.refused
    assert tuple(name for (name,) in told.get("found", [])) == LOADED, done.output
    assert ("profile" in told) == (change is not mapped)  # a user namespace lists no GPU
    assert not log.exists()


def test_hook_that_is_not_known_runs_and_is_named(ground: Ground, tmp_path: Path) -> None:
    node = ground.node
    path, log = trap(tmp_path)
    told: list[str] = []

    def with_unknown(spec: dict[str, Any]) -> None:
        apply(spec, node, path)
        spec["hooks"]["createRuntime"] = [{"path": path, "args": [path, "explode", "--all"]}]

    def explain(pid: int) -> None:
        where = ("--config", node.config_path)
        states = ("--containerd-state", f"{ground.containerd.directory}/state")
        told.extend(
            nvshim("explain", str(pid), *more, *where, *states).stdout for more in ((), ("-v",))
        )

    done = ground.run(
        ground.image(), "true", env=(), edit=with_unknown, while_created=explain
    )  # fmt: skip
    assert not done.refused
    assert log.read_text() == "explode --all\n"
    assert done.record["spec_hooks"]["left"] == [
        {"stage": "createRuntime", "command": f"{path} explode --all"}
    ]
    assert len(done.record["spec_hooks"]["done"]) == 8
    short, long = told
    for text in told:
        assert "".join(f"{path} explode --all: the runtime runs it".split()) in "".join(
            text.split()
        )
    short = " ".join(short.split())
    assert "8 of NVIDIA's hooks in its spec: done in process, not run" in short
    files = len(list(engine_cdi.mounts(node)))
    assert f"device nodes and {files} files of the driver in its spec" in short
    assert "has GPUs 0, 1 (NVIDIA H100" in short
    assert "granted" not in short
    assert f"createContainer {path} update-ldcache: done in process, not run" in long


def test_request_of_containerds_clients_is_done_and_their_hook_does_not_run(
    ground: Ground, tmp_path: Path
) -> None:
    cli, log = trap(tmp_path, "nvidia-container-cli")
    containerd, outer = trap(tmp_path, "containerd")

    def with_gpus_flag(spec: dict[str, Any]) -> None:
        words = ["containerd", "oci-hook", "--", cli, "--load-kmods", "configure", "--device=1"]
        words += ["--compute", "--utility", "--pid={{pid}}", "{{rootfs}}"]
        spec["hooks"] = {"prestart": [{"path": containerd, "args": words}]}

    done = ground.run(
        ground.image(), "sh", "-c", "nvidia-smi -L; ls /dev", edit=with_gpus_flag
    )  # the image requests all
    assert not done.refused
    assert not log.exists()
    assert not outer.exists()
    gpus = ground.node.scenario.gpus
    assert gpus[1].uuid in done.output, done.output
    assert gpus[0].uuid not in done.output
    nodes = done.output.split()
    assert "nvidia1" in nodes
    assert "nvidia0" not in nodes
    assert "dri" not in nodes  # the image's "all" does not replace the requested capabilities
    assert done.record["request"]["origin"] == "spec"


def test_engines_gpus_are_those_that_commands_show(ground: Ground, tmp_path: Path) -> None:
    path, _ = trap(tmp_path)
    shown: list[Any] = []

    def look(pid: int) -> None:
        where = ("--config", ground.node.config_path)
        states = ("--containerd-state", f"{ground.containerd.directory}/state")
        rows = nvshim("list", "-o", "json", *where, *states).items
        shown.extend(row["uuid"] for row in rows if row["containers"])

    edit = partial(apply, node=ground.node, program=path)
    done = ground.run(ground.image(), "true", env=(), edit=edit, while_created=look)
    assert not done.refused
    assert json.loads(json.dumps(done.record)) == done.record
    assert sorted(shown) == sorted(gpu.uuid for gpu in ground.node.scenario.gpus)
