"""GPU containers on a simulated node: what is inside, what is not, and what is left."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from integration.simulated import SimulatedNode
from tests.harness import api
from tests.harness.cgroup import is_v2, read_cgroup
from tests.harness.runtime import Runtime, is_alive, new_name, remove_fifos
from tests.harness.waiting import eventually
from tools.containerd import Completed, PrivateContainerd
from tools.images import BUSYBOX, GLIBC, glibc, write_archive

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"
LISTED: Final = re.compile(r"\(UUID: ((?:GPU|MIG)-[0-9a-f-]+)\)")

ALL_IN_IMAGE: Final = "nvshim.local/asks-for-all:latest"


@pytest.fixture(scope="module", autouse=True)
def _images(session_containerd: PrivateContainerd, workshop: str) -> Iterator[None]:
    """Import the odd images into containerd for this module."""
    images = [glibc().named(ALL_IN_IMAGE, environment={DEVICES: "all", CAPABILITIES: "utility"})]
    archive = write_archive(os.path.join(workshop, "odd-images.tar"), images)
    session_containerd.ctr("images", "import", archive)
    os.unlink(archive)
    yield
    session_containerd.ctr("images", "rm", "--sync", *(image.name for image in images))


def test_container_with_a_gpu_sees_it_and_no_other_and_loads_the_driver(
    gpus: Runtime, two_gpus: SimulatedNode
) -> None:
    directory, version = _library_directory(), two_gpus.driver_version
    libraries = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"]
    links = ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1")
    before = _cached(gpus.run("ldconfig", "-p", image=GLIBC).lines)
    seen = _seen(
        gpus, devices="1",
        nodes="stat -c '%n %F %t:%T %a' /dev/nvidia*",
        opened="probe open /dev/nvidia1 /dev/nvidiactl; true",
        loaded=f"probe dlopen {' '.join(libraries)}",
        links=f"cd {directory}; for n in {' '.join(links)}; do readlink -f $n; done",
        environment="env",
        listed="nvidia-smi -L",
        cache="ldconfig -p",
        again="ldconfig && ldconfig -p && probe dlopen libcuda.so.1",
    )  # fmt: skip
    expected = {"nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
    assert set(seen["nodes"]) == {_as_stat_prints(two_gpus, name) for name in expected}
    # A simulated node has no kernel module: ENXIO means that it may be opened.
    assert seen["opened"] == ["/dev/nvidia1 ENXIO", "/dev/nvidiactl ENXIO"]
    paths = dict(line.split() for line in seen["loaded"])
    assert list(paths) == libraries
    assert {os.path.dirname(path) for path in paths.values()} == {directory}
    assert seen["links"] == [
        f"{directory}/libcuda.so.{version}",
        f"{directory}/libcuda.so.{version}",
        f"{directory}/libnvidia-ml.so.{version}",
    ]
    environment = dict(line.split("=", 1) for line in seen["environment"])
    assert environment[DEVICES] == "1"
    assert environment["NVIDIA_CTK_LIBCUDA_DIR"] == directory
    assert LISTED.findall("\n".join(seen["listed"])) == [two_gpus.scenario.gpus[1].uuid]
    after = _cached(seen["cache"])
    assert before.items() <= after.items()
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= set(after) - set(before)
    assert {"libcuda.so.1", "libnvidia-ml.so.1", "libc.so.6"} <= set(_cached(seen["again"]))


def test_image_without_glibc_gets_the_nodes_and_cannot_make_another(gpus: Runtime) -> None:
    script = "ls /dev/nvidia0 /dev/nvidiactl && mknod /tmp/other c 195 1; cat /tmp/other"
    done = _run(gpus, "sh", "-c", script, devices="0", image=BUSYBOX)
    assert done.lines == ["/dev/nvidia0", "/dev/nvidiactl"]
    assert "No such device or address" not in done.stderr
    assert "Operation not permitted" in done.stderr


def test_each_capability_brings_what_it_stands_for(gpus: Runtime) -> None:
    both = "probe dlopen libcuda.so.1 libnvidia-ml.so.1; true"
    utility = _seen(gpus, devices="0", capabilities="utility", loaded=both, nodes="ls /dev")
    assert utility["loaded"][0].startswith("libcuda.so.1 - ")
    assert utility["loaded"][1].startswith("libnvidia-ml.so.1 /")
    assert _of_nvidia(utility["nodes"]) == {"nvidia0", "nvidiactl"}
    compute = _seen(
        gpus, devices="0", capabilities="compute",
        loaded=both, smi="! command -v nvidia-smi",
    )  # fmt: skip
    assert compute["loaded"][0].startswith("libcuda.so.1 /")
    assert compute["loaded"][1].startswith("libnvidia-ml.so.1 - ")
    graphics = _seen(
        gpus, devices="0", capabilities="graphics",
        groups="id -G", nodes="ls /dev/dri /dev/nvidia-modeset",
        vendors="ls /usr/share/glvnd/egl_vendor.d",
    )  # fmt: skip
    assert "44" in graphics["groups"][0].split()
    assert {"card0", "renderD128", "/dev/nvidia-modeset"} <= set(graphics["nodes"])
    assert "card1" not in graphics["nodes"]
    assert "10_nvidia.json" in graphics["vendors"]


def test_all_gpus_and_every_capability_load_what_each_stands_for(
    gpus: Runtime, two_gpus: SimulatedNode
) -> None:
    names = (
        "libcuda.so.1 libnvidia-ml.so.1 libnvidia-encode.so.1 libnvcuvid.so.1 "
        "libnvidia-opticalflow.so.1 libnvidia-ngx.so.1"
    )
    seen = _seen(
        gpus, devices="all", capabilities="all",
        loaded=f"probe dlopen {names}", nodes="ls /dev", listed="nvidia-smi -L",
    )  # fmt: skip
    assert {"nvidia0", "nvidia1"} <= _of_nvidia(seen["nodes"])
    uuids = [gpu.uuid for gpu in two_gpus.scenario.gpus]
    assert LISTED.findall("\n".join(seen["listed"])) == uuids


def test_none_brings_the_driver_and_no_gpu(gpus: Runtime) -> None:
    loaded = "probe dlopen libcuda.so.1 libnvidia-ml.so.1"
    seen = _seen(gpus, devices="none", loaded=loaded, nodes="ls /dev")
    assert _of_nvidia(seen["nodes"]) == {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}


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
    # No JSON encoder produces this form.
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


def test_a_running_container_and_what_it_executes_have_the_gpu_and_the_rest_of_the_spec(
    gpus: Runtime, two_gpus: SimulatedNode
) -> None:
    container = gpus.start_idle(image=GLIBC, flags=_env(devices="1", capabilities="all"))
    info = gpus.containerd.ctr("containers", "info", container.name).stdout
    before = json.loads(info)["Spec"]
    with open(os.path.join(gpus.containerd.bundle(container.name), "config.json")) as file:
        after = json.load(file)
    assert _is_within(before, after)
    assert not after.get("hooks")
    assert after["linux"]["maskedPaths"] == before["linux"]["maskedPaths"]
    if not is_v2():  # cgroup v2 has device rules in a BPF program, and no file to read
        rules = read_cgroup(container.pid, "devices", v1="devices.list", v2="").splitlines()
        uvm = os.major(os.stat(f"{two_gpus.dev}/nvidia-uvm").st_rdev)
        ours = [rule for rule in rules if rule.split()[1].split(":")[0] in {"195", str(uvm)}]
        numbers = ("195:1", "195:254", "195:255", f"{uvm}:0", f"{uvm}:1")
        assert sorted(ours) == sorted(f"c {number} rwm" for number in numbers)
    script = (
        "echo $NVIDIA_CTK_LIBCUDA_DIR; probe open /dev/nvidia1 /dev/nvidia0; id -G;"
        " probe dlopen libcuda.so.1 >/dev/null"
    )
    done = container.exec("sh", "-c", script)
    assert done.code == 0
    assert done.lines[:-1] == [
        _library_directory(), "/dev/nvidia1 ENXIO", "/dev/nvidia0 ENOENT",
    ]  # fmt: skip
    assert "44" in done.lines[-1].split()
    gpus.containerd.restart()
    user = container.exec("probe", "open", "/dev/nvidia1", flags=["--user", "1000"])
    assert user.stdout == "/dev/nvidia1 ENXIO\n"


def test_an_image_asks_by_its_environment_and_the_user_overrides_it(
    gpus: Runtime, two_gpus: SimulatedNode
) -> None:
    done = gpus.run("nvidia-smi", "-L", image=ALL_IN_IMAGE)
    assert LISTED.findall(done.stdout) == [gpu.uuid for gpu in two_gpus.scenario.gpus]
    done = gpus.run("nvidia-smi", "-L", image=ALL_IN_IMAGE, flags=_env(devices="1"))
    assert LISTED.findall(done.stdout) == [two_gpus.scenario.gpus[1].uuid]
    void = gpus.run("sh", "-c", "ls /dev", image=ALL_IN_IMAGE, flags=_env(devices="void"))
    assert "nvidia" not in void.stdout


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
    ("devices", "code", "named"),
    [("0,7", "NVSHIM-E0202", "7"), ("0\n1", "NVSHIM-E0201", "0 1")],
)
def test_bad_request_is_a_typed_error(gpus: Runtime, devices: str, code: str, named: str) -> None:
    done = _run(gpus, "true", devices=devices)
    _expect_refusal(done, code, named)


@pytest.mark.parametrize(
    ("config", "code", "named"),
    [
        ('[node]\ndriver-root = "{empty}"\n', "NVSHIM-E0102", "{empty}"),
        ("[node\n", "NVSHIM-E0502", "config.toml"),
    ],
    ids=["no driver", "no TOML"],
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


def _seen(
    runtime: Runtime, *, devices: str, capabilities: str | None = None, **scripts: str
) -> dict[str, list[str]]:
    """Return one container's output as lines; the first script that fails is named."""
    text = "\n".join(
        f"echo '== {name}'; ({script}) || exit {code}"
        for code, (name, script) in enumerate(scripts.items(), start=100)
    )
    done = _run(runtime, "sh", "-c", text, devices=devices, capabilities=capabilities)
    failed = list(scripts)[done.code - 100 : done.code - 99] if done.code else []
    assert (done.code, failed) == (0, []), done.stdout + done.stderr
    parts = done.stdout.split("== ")[1:]
    return {name: lines for name, *lines in (part.splitlines() for part in parts)}


def _of_nvidia(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("nvidia")}


def _cached(lines: list[str]) -> dict[str, str]:
    """Parse the output of ``ldconfig -p``: name and architecture → path."""
    return dict(re.findall(r"^\t(\S+) \(.*?\) => (\S+)$", "\n".join(lines), re.MULTILINE))


def _as_stat_prints(node: SimulatedNode, name: str) -> str:
    """Return a node of the host, as ``stat -c '%n %F %t:%T %a'`` prints it inside."""
    found = os.stat(os.path.join(node.dev, name))
    major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
    mode = stat.S_IMODE(found.st_mode)
    return f"/dev/{name} character special file {major:x}:{minor:x} {mode:o}"


def _library_directory() -> str:
    """Return the directory of libc in the image of tools.images."""
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
    """Return the snapshot that a container of the image is made from."""
    name = new_name()
    runtime.create_with_image(name, "true", image=image)
    try:
        text = runtime.containerd.ctr("snapshots", "info", name).stdout
    finally:
        runtime.containerd.ctr("containers", "rm", name)
    parent: str = json.loads(text)["Parent"]
    return parent


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
