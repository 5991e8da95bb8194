"""GPU containers on a simulated node: what is inside, what is not, and what is left."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from integration.simulated import SimulatedNode
from integration.simulated.containerd import Completed, PrivateContainerd
from tests.harness import api
from tests.harness.cgroup import is_v2, read_cgroup
from tests.harness.runtime import Runtime, is_alive, new_name, remove_fifos
from tests.harness.waiting import eventually
from tests.tools.images import BUSYBOX, GLIBC, Directory, behind_link, glibc, write_archive

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"
LISTED: Final = re.compile(r"\(UUID: ((?:GPU|MIG)-[0-9a-f-]+)\)")

ALL_IN_IMAGE: Final = "nvshim.local/asks-for-all:latest"
LEGACY_IMAGE: Final = "nvshim.local/legacy:latest"
# Images in which a place that the engine writes to is a link.
LINKED: Final = {
    "etc, inside": ("etc", "/data/etc"),
    "etc, relative": ("etc", "data/etc"),
    "etc, upwards": ("etc", "../../../../data/etc"),
    "usr/lib, inside": ("usr/lib", "/data/lib"),
    "etc/ld.so.conf.d, inside": ("etc/ld.so.conf.d", "/data/conf"),
    "etc/ld.so.cache, inside": ("etc/ld.so.cache", "/data/cache"),
}


@pytest.fixture(scope="module", autouse=True)
def _images(session_containerd: PrivateContainerd, workshop: str) -> Iterator[None]:
    """The odd images, in containerd for the length of this module."""
    plain = glibc()
    images = [
        plain.named(ALL_IN_IMAGE, environment={DEVICES: "all", CAPABILITIES: "utility"}),
        plain.named(LEGACY_IMAGE, environment={"CUDA_VERSION": "12.2.0"}),
    ]
    for name, (path, target) in LINKED.items():
        tree = behind_link(plain.tree, path, target=target)
        images.append(replace(plain, name=_linked(name), tree=tree))
    bare = {place: node for place, node in plain.tree.items() if not place.startswith("etc/")}
    images.append(replace(plain, name=_linked("no etc"), tree={**bare, "tmp": Directory(0o1777)}))
    archive = write_archive(os.path.join(workshop, "odd-images.tar"), images)
    session_containerd.ctr("images", "import", archive)
    os.unlink(archive)
    yield
    session_containerd.ctr("images", "rm", "--sync", *(image.name for image in images))


def test_granted_gpu_is_there_and_the_other_is_not(gpus: Runtime, two_gpus: SimulatedNode) -> None:
    done = _run(gpus, "sh", "-c", "stat -c '%n %F %t:%T %a' /dev/nvidia*", devices="1")
    expected = {"nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
    assert set(done.lines) == {_as_stat_prints(two_gpus, name) for name in expected}


def test_all_gpus_are_there_if_all_are_asked_for(gpus: Runtime) -> None:
    done = _run(gpus, "sh", "-c", "echo /dev/nvidia[0-9]*", devices="all")
    assert done.stdout == "/dev/nvidia0 /dev/nvidia1\n"


def test_cgroup_allows_the_granted_gpu_and_no_other(gpus: Runtime, two_gpus: SimulatedNode) -> None:
    container = gpus.start_idle(image=GLIBC, flags=_env(devices="1"))
    if is_v2():
        pytest.skip("version 2 has its device rules in a BPF program, which has no file to read")
    rules = read_cgroup(container.pid, "devices", v1="devices.list", v2="").splitlines()
    uvm = os.major(os.stat(f"{two_gpus.dev}/nvidia-uvm").st_rdev)
    ours = [rule for rule in rules if rule.split()[1].split(":")[0] in {"195", str(uvm)}]
    assert sorted(ours) == sorted(
        ["c 195:1 rwm", "c 195:255 rwm", f"c {uvm}:0 rwm", f"c {uvm}:1 rwm"]
    )


def test_granted_gpu_can_be_opened_and_another_cannot_even_be_made(gpus: Runtime) -> None:
    # Nobody is behind a simulated node: ENXIO is the answer of a node that may be opened.
    done = _run(gpus, "probe", "open", "/dev/nvidia1", "/dev/nvidiactl", devices="1")
    assert done.lines == ["/dev/nvidia1 ENXIO", "/dev/nvidiactl ENXIO"]
    made = _run(
        gpus, "sh", "-c", "mknod /tmp/other c 195 0; cat /tmp/other", devices="1", image=BUSYBOX
    )
    assert "No such device or address" not in made.stderr
    assert "Operation not permitted" in made.stderr


def test_libraries_of_the_driver_load_by_their_names(
    gpus: Runtime, two_gpus: SimulatedNode
) -> None:
    names = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"]
    done = _run(gpus, "probe", "dlopen", *names, devices="0")
    assert done.code == 0, done.stdout
    for name, line in zip(names, done.lines, strict=True):
        loaded, path = line.split()
        assert loaded == name
        assert os.path.dirname(path) == _library_directory()


def test_links_beside_a_library_lead_to_it(gpus: Runtime, two_gpus: SimulatedNode) -> None:
    directory = _library_directory()
    names = ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"]
    done = _run(
        gpus, "sh", "-c", f"cd {directory}; for n in {' '.join(names)}; do readlink -f $n; done",
        devices="0",
    )  # fmt: skip
    version = two_gpus.driver_version
    assert done.lines == [
        f"{directory}/libcuda.so.{version}",
        f"{directory}/libcuda.so.{version}",
        f"{directory}/libnvidia-ml.so.{version}",
    ]


def test_cache_of_the_loader_has_the_driver_and_all_it_had_before(gpus: Runtime) -> None:
    before = _cached(gpus.run("ldconfig", "-p", image=GLIBC))
    after = _cached(_run(gpus, "ldconfig", "-p", devices="0"))
    assert before.items() <= after.items()
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= set(after) - set(before)


def test_ldconfig_inside_keeps_the_driver_in_the_cache(gpus: Runtime) -> None:
    done = _run(
        gpus, "sh", "-c", "ldconfig && ldconfig -p && probe dlopen libcuda.so.1", devices="0"
    )
    assert done.code == 0, done.stderr
    assert {"libcuda.so.1", "libnvidia-ml.so.1", "libc.so.6"} <= set(_cached(done))


def test_environment_is_the_users_with_what_the_driver_needs(gpus: Runtime) -> None:
    environment = _environment(_run(gpus, "env", devices="0"))
    assert environment[DEVICES] == "0"
    assert environment["NVIDIA_CTK_LIBCUDA_DIR"] == _library_directory()


@pytest.mark.parametrize(("devices", "indices"), [("1", [1]), ("all", [0, 1])])
def test_nvidia_smi_lists_the_granted_gpus(
    gpus: Runtime, two_gpus: SimulatedNode, devices: str, indices: list[int]
) -> None:
    done = _run(gpus, "nvidia-smi", "-L", devices=devices)
    assert done.code == 0, done.stdout + done.stderr
    assert LISTED.findall(done.stdout) == [two_gpus.scenario.gpus[index].uuid for index in indices]


def test_gpu_can_be_asked_for_by_its_uuid_in_any_case(
    gpus: Runtime, two_gpus: SimulatedNode
) -> None:
    uuid = two_gpus.scenario.gpus[1].uuid
    for name in (uuid, "GPU-" + uuid.removeprefix("GPU-").upper()):
        done = _run(gpus, "nvidia-smi", "-L", devices=name)
        assert LISTED.findall(done.stdout) == [uuid]


def test_utility_alone_brings_no_cuda(gpus: Runtime) -> None:
    done = _run(
        gpus, "probe", "dlopen", "libnvidia-ml.so.1", "libcuda.so.1",
        devices="0", capabilities="utility",
    )  # fmt: skip
    assert done.lines[0].startswith("libnvidia-ml.so.1 /")
    assert done.lines[1].startswith("libcuda.so.1 - ")
    assert _nodes(gpus, devices="0", capabilities="utility") == {"nvidia0", "nvidiactl"}


def test_compute_alone_brings_no_nvidia_smi(gpus: Runtime) -> None:
    done = _run(
        gpus, "sh", "-c", "command -v nvidia-smi || probe dlopen libcuda.so.1 libnvidia-ml.so.1",
        devices="0", capabilities="compute",
    )  # fmt: skip
    assert done.lines[0].startswith("libcuda.so.1 /")
    assert done.lines[1].startswith("libnvidia-ml.so.1 - ")


def test_graphics_brings_its_nodes_and_their_group(gpus: Runtime) -> None:
    script = "id -G; ls /dev/dri /dev/nvidia-modeset; ls /usr/share/glvnd/egl_vendor.d"
    done = _run(gpus, "sh", "-c", script, devices="0", capabilities="graphics")
    assert done.code == 0, done.stderr
    groups, rest = done.lines[0].split(), done.lines[1:]
    assert "44" in groups
    assert {"card0", "renderD128", "/dev/nvidia-modeset", "10_nvidia.json"} <= set(rest)
    assert "card1" not in rest


def test_every_capability_at_once_loads_what_each_stands_for(gpus: Runtime) -> None:
    names = [
        "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-encode.so.1", "libnvcuvid.so.1",
        "libnvidia-opticalflow.so.1", "libnvidia-ngx.so.1",
    ]  # fmt: skip
    done = _run(gpus, "probe", "dlopen", *names, devices="all", capabilities="all")
    assert done.code == 0, done.stdout


def test_none_brings_the_driver_and_no_gpu(gpus: Runtime) -> None:
    done = _run(gpus, "probe", "dlopen", "libcuda.so.1", "libnvidia-ml.so.1", devices="none")
    assert done.code == 0, done.stdout
    assert _nodes(gpus, devices="none") == {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}


@pytest.mark.parametrize("devices", [None, "0,void"])
def test_spec_is_untouched_byte_for_byte_if_no_gpu_is_asked_for(
    gpus: Runtime, devices: str | None
) -> None:
    variable = [] if devices is None else [f"{DEVICES}={devices}"]
    container = gpus.expect()
    gpus.create_with_image(container.name, "true", image=GLIBC)
    mounts = gpus.prepare_rootfs(container.name)
    spec = gpus.spec("sleep", "1000", image=GLIBC)
    spec["process"]["env"] += variable
    spec["unknown to us"] = {"kept": [1, 2.50, None]}
    # No encoder writes it like this by itself.
    written = json.dumps(spec, indent=3, separators=(" ,", " : ")).encode() + b"\n \n"
    gpus.containerd.ctr("containers", "rm", container.name)
    name = new_name()
    again = gpus.expect(name)
    api.create_container(gpus.containerd, name, runtime=gpus.name, spec=written)
    gpus.containerd.ctr("snapshots", "prepare", name, _top_layer(gpus, GLIBC))
    try:
        api.create_task(gpus.containerd, name, mounts=gpus.prepare_rootfs(name) or mounts)
        api.start_task(gpus.containerd, name)
        bundle = gpus.containerd.bundle(name)
        with open(os.path.join(bundle, "config.json"), "rb") as file:
            assert file.read() == written
        for left in ("nvidia.json", "nvidia-before.json", "nvidia"):
            assert not os.path.lexists(os.path.join(bundle, left))
        assert again.status == "RUNNING"
    finally:
        again.remove()
        gpus.containerd.ctr("snapshots", "rm", name)


def test_everything_of_the_spec_is_kept_and_no_hook_is_added(gpus: Runtime) -> None:
    container = gpus.start_idle(image=GLIBC, flags=_env(devices="all"))
    info = gpus.containerd.ctr("containers", "info", container.name).stdout
    before = json.loads(info)["Spec"]
    with open(os.path.join(gpus.containerd.bundle(container.name), "config.json")) as file:
        after = json.load(file)
    assert _is_within(before, after)
    assert not after.get("hooks")
    assert after["linux"]["maskedPaths"] == before["linux"]["maskedPaths"]


def test_exec_has_what_init_has(gpus: Runtime) -> None:
    container = gpus.start_idle(image=GLIBC, flags=_env(devices="1", capabilities="all"))
    environment = _environment(container.exec("env"))
    assert environment["NVIDIA_CTK_LIBCUDA_DIR"] == _library_directory()
    assert container.exec("probe", "dlopen", "libcuda.so.1").code == 0
    assert container.exec("probe", "open", "/dev/nvidia1").stdout == "/dev/nvidia1 ENXIO\n"
    assert container.exec("probe", "open", "/dev/nvidia0").stdout == "/dev/nvidia0 ENOENT\n"
    assert "44" in container.exec("id", "-G").stdout.split()


def test_exec_of_an_ordinary_user_can_open_the_gpu(gpus: Runtime) -> None:
    container = gpus.start_idle(image=GLIBC, flags=_env(devices="0"))
    done = container.exec("probe", "open", "/dev/nvidia0", flags=["--user", "1000"])
    assert done.stdout == "/dev/nvidia0 ENXIO\n"


def test_image_can_ask_by_its_environment(gpus: Runtime, two_gpus: SimulatedNode) -> None:
    done = gpus.run("nvidia-smi", "-L", image=ALL_IN_IMAGE)
    assert LISTED.findall(done.stdout) == [gpu.uuid for gpu in two_gpus.scenario.gpus]


def test_user_overrides_what_the_image_asks_for(gpus: Runtime, two_gpus: SimulatedNode) -> None:
    done = gpus.run("nvidia-smi", "-L", image=ALL_IN_IMAGE, flags=_env(devices="1"))
    assert LISTED.findall(done.stdout) == [two_gpus.scenario.gpus[1].uuid]
    void = gpus.run("sh", "-c", "ls /dev", image=ALL_IN_IMAGE, flags=_env(devices="void"))
    assert "nvidia" not in void.stdout


def test_legacy_image_gets_all_gpus_and_capabilities(gpus: Runtime) -> None:
    done = gpus.run("sh", "-c", "ls /dev/nvidia*; ls /dev/dri", image=LEGACY_IMAGE)
    assert {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia-modeset", "card0"} <= set(done.lines)


def test_container_that_asks_for_nothing_has_nothing(gpus: Runtime) -> None:
    done = gpus.run("sh", "-c", "ls /dev; ldconfig -p; env", image=GLIBC)
    assert "nvidia" not in done.stdout.lower()
    assert "libcuda" not in done.stdout


def test_read_only_container_finds_the_libraries(gpus: Runtime) -> None:
    flags = [*_env(devices="0"), "--read-only"]
    done = gpus.run(
        "probe", "dlopen", "libcuda.so.1", "libnvidia-ml.so.1", image=GLIBC, flags=flags
    )
    assert done.code == 0, done.stdout


def test_image_without_glibc_gets_the_nodes(gpus: Runtime) -> None:
    done = _run(gpus, "sh", "-c", "ls /dev/nvidia0 /dev/nvidiactl", devices="0", image=BUSYBOX)
    assert (done.code, done.stderr) == (0, "")


def test_second_start_of_a_container_adds_nothing_more(gpus: Runtime) -> None:
    script = "ls -R /etc /usr/lib; sha256sum /etc/ld.so.cache"
    container = gpus.start("sh", "-c", f"({script}) >>/tmp/seen; sleep 1000", image=GLIBC,
                           flags=_env(devices="0"))  # fmt: skip
    seen = []
    for turn in range(2):
        if turn:
            gpus.containerd.ctr("tasks", "start", "--detach", "--null-io", container.name)
        container.wait_for_program("sleep")
        seen.append(container.exec("cat", "/tmp/seen").stdout)
        container.exec("rm", "/tmp/seen")
        container.kill("KILL")
        container.exit_code()
    assert seen[0] == seen[1]


def test_only_the_container_that_asks_gets_gpus_in_a_pod(gpus: Runtime) -> None:
    pod = ["--annotation", f"io.containerd.runc.v2.group={new_name('pod')}"]
    first = gpus.start_idle(image=GLIBC, flags=[*pod, *_env(devices="0")])
    second = gpus.start_idle(image=GLIBC, flags=pod)
    third = gpus.start_idle(image=GLIBC, flags=[*pod, *_env(devices="1")])
    assert len(gpus.containerd.shim_pids()) == 1
    listed = [c.exec("sh", "-c", "ls /dev | grep '^nvidia[0-9]'") for c in (first, second, third)]
    assert [done.stdout for done in listed] == ["nvidia0\n", "", "nvidia1\n"]


def test_killed_shim_of_a_gpu_container_leaves_nothing(gpus: Runtime) -> None:
    container = gpus.start_idle(image=GLIBC, flags=[*_env(devices="all"), "--read-only"])
    init = container.pid
    (shim,) = gpus.containerd.shim_pids()
    os.kill(shim, signal.SIGKILL)
    eventually(lambda: not is_alive(init), "init is dead")
    eventually(lambda: not os.path.exists(gpus.containerd.bundle(container.name)), "cleaned up")
    gpus.close()
    remove_fifos(gpus.containerd)


def test_gpu_container_survives_a_restart_of_containerd(gpus: Runtime) -> None:
    container = gpus.start_idle(image=GLIBC, flags=_env(devices="0"))
    gpus.containerd.restart()
    environment = _environment(container.exec("env"))
    assert environment["NVIDIA_CTK_LIBCUDA_DIR"] == _library_directory()
    assert container.exec("probe", "open", "/dev/nvidia0").stdout == "/dev/nvidia0 ENXIO\n"


def test_mig_devices_are_listed_one_by_one(
    runtime: Runtime, mig_gpus: SimulatedNode, configure: Any
) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    configure(_text(mig_gpus.config_path))
    first = runtime.run("nvidia-smi", "-L", image=GLIBC, flags=_env(devices="0:0"))
    assert first.code == 0, first.stdout + first.stderr
    (uuid,) = (name for name in LISTED.findall(first.stdout) if name.startswith("MIG-"))
    again = runtime.run("nvidia-smi", "-L", image=GLIBC, flags=_env(devices=uuid))
    assert again.stdout == first.stdout
    nodes = runtime.run("sh", "-c", "ls /dev/nvidia-caps", image=GLIBC, flags=_env(devices="0:0"))
    assert len(nodes.lines) == 2, "one of the GPU instance, one of the compute instance"


@pytest.mark.parametrize(
    ("devices", "capabilities", "code", "named"),
    [
        ("0,7", None, "NVSHIM-E0202", "7"),
        ("0\n1", None, "NVSHIM-E0201", "0 1"),
        ("0", "utility,,Compute", "NVSHIM-E0203", "Compute"),
    ],
)
def test_bad_request_is_a_typed_error(
    gpus: Runtime, devices: str, capabilities: str | None, code: str, named: str
) -> None:
    done = _run(gpus, "true", devices=devices, capabilities=capabilities)
    _expect_refusal(done, code, named)


@pytest.mark.parametrize(
    ("config", "code", "named"),
    [
        ('[node]\ndriver-root = "{empty}"\n', "NVSHIM-E0102", "{empty}"),
        ('[node]\ndriver-root = "{empty}/no-such"\n', "NVSHIM-E0102", "{empty}/no-such"),
        ("[node\n", "NVSHIM-E0502", "config.toml"),
        ('[node]\ndriver-rot = "/"\n', "NVSHIM-E0503", "driver-rot"),
    ],
    ids=["no driver", "no driver root", "no TOML", "unknown key"],
)
def test_unfit_node_is_a_typed_error(
    gpus: Runtime, configure: Any, tmp_path: Path, config: str, code: str, named: str
) -> None:
    configure(config.format(empty=tmp_path))
    _expect_refusal(_run(gpus, "true", devices="all"), code, named.format(empty=tmp_path))


@pytest.mark.parametrize("config", ["[node\n", '[node]\ndriver-root = "/no/such"\n'])
def test_unfit_node_does_not_matter_to_who_asks_for_no_gpu(
    gpus: Runtime, configure: Any, config: str
) -> None:
    configure(config)
    assert gpus.run("echo", "hi").stdout == "hi\n"


@pytest.mark.parametrize("name", [*LINKED, "no etc"])
def test_image_with_a_link_inside_is_served_like_any_other(gpus: Runtime, name: str) -> None:
    done = _run(
        gpus, "sh", "-c", "probe dlopen libcuda.so.1 libnvidia-ml.so.1 && nvidia-smi -L",
        devices="0", image=_linked(name),
    )  # fmt: skip
    assert done.code == 0, done.stdout + done.stderr
    assert len(LISTED.findall(done.stdout)) == 1


def _run(
    runtime: Runtime,
    *command: str,
    devices: str,
    capabilities: str | None = None,
    image: str = GLIBC,
) -> Completed:
    flags = _env(devices=devices, capabilities=capabilities)
    return runtime.run(*command, image=image, flags=flags)


def _env(*, devices: str, capabilities: str | None = None) -> list[str]:
    words = ["--env", f"{DEVICES}={devices}"]
    if capabilities is not None:
        words += ["--env", f"{CAPABILITIES}={capabilities}"]
    return words


def _expect_refusal(done: Completed, code: str, named: str) -> None:
    assert done.code == 1
    assert code in done.stderr
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def _nodes(runtime: Runtime, *, devices: str, capabilities: str | None = None) -> set[str]:
    done = _run(runtime, "ls", "/dev", devices=devices, capabilities=capabilities)
    return {name for name in done.lines if name.startswith("nvidia")}


def _cached(done: Completed) -> dict[str, str]:
    """The lines of ``ldconfig -p``: name and architecture → path."""
    found = re.findall(r"^\t(\S+) \(.*?\) => (\S+)$", done.stdout, re.MULTILINE)
    return dict(found)


def _environment(done: Completed) -> dict[str, str]:
    return dict(line.split("=", 1) for line in done.lines)


def _as_stat_prints(node: SimulatedNode, name: str) -> str:
    """A node of the host, as ``stat -c '%n %F %t:%T %a'`` prints it inside."""
    found = os.stat(os.path.join(node.dev, name))
    major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
    mode = stat.S_IMODE(found.st_mode)
    return f"/dev/{name} character special file {major:x}:{minor:x} {mode:o}"


def _library_directory() -> str:
    """Where the image of tests.tools.images has its libc."""
    return next("/" + os.path.dirname(path) for path in glibc().tree if path.endswith("/libc.so.6"))


def _is_within(small: Any, large: Any) -> bool:
    """Whether everything in a JSON value is in another at its place, lists in order."""
    if isinstance(small, dict):
        return isinstance(large, dict) and all(
            key in large and _is_within(value, large[key]) for key, value in small.items()
        )
    if isinstance(small, list):
        rest = iter(large)
        return all(any(_is_within(item, other) for other in rest) for item in small)
    return bool(small == large)


def _top_layer(runtime: Runtime, image: str) -> str:
    """The snapshot that a container of the image is made from."""
    name = new_name()
    runtime.create_with_image(name, "true", image=image)
    try:
        text = runtime.containerd.ctr("snapshots", "info", name).stdout
    finally:
        runtime.containerd.ctr("containers", "rm", name)
    parent: str = json.loads(text)["Parent"]
    return parent


def _linked(name: str) -> str:
    return f"nvshim.local/linked-{_slug(name)}:latest"


def _slug(name: str) -> str:
    return re.sub("[^a-z]+", "-", name)


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
