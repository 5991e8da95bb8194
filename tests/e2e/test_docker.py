"""The real dockerd on a simulated node: ``--gpus``, the environment, Docker's own CDI."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from integration.containers.traces import cgroup_hierarchies
from integration.simulated import SimulatedNode
from tests.harness import engine_cdi
from tests.harness.containerds import nothing_left
from tests.harness.docker import DockerParts, PrivateDocker
from tests.harness.engine_cdi import trap
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.runtime import OURS, new_name
from tests.harness.waiting import settled
from tools.containerd import Completed, PrivateContainerd
from tools.images import glibc
from tools.parts import Parts

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CDI_DIRECTORY: Final = "cdi"
# dockerd and containerd of one release. Debian 12's Docker supports only the shim name
# containerd-shim-runc-v2, so ours takes that name there.
RELEASES: Final = of_releases("bookworm", "trixie", UNSTABLE)
SHOW: Final = "ls /dev | grep ^nvidia; env | grep ^NVIDIA_"


@pytest.fixture(scope="module")
def shims(workshop: str, shim_directory: str) -> str:
    """Return a directory in which every shim name is ours."""
    directory = f"{workshop}/shims"
    os.makedirs(directory)
    for name in ("containerd-shim-nvidia-v1", "containerd-shim-runc-v2"):
        os.symlink(f"{shim_directory}/containerd-shim-nvidia-v1", f"{directory}/{name}")
    return directory


@pytest.fixture(scope="module", params=RELEASES)
def daemon(
    request: pytest.FixtureRequest, two_gpus: SimulatedNode, shims: str
) -> Iterator[tuple[PrivateDocker, PrivateContainerd]]:
    release: str = request.param
    old = release == "bookworm"
    settings: dict[str, Any] = {} if old else {
        "runtimes": {"nvidia": {"runtimeType": OURS}},
        "default-runtime": "nvidia",
        "features": {"cdi": True},
    }  # fmt: skip
    parts = Parts.installed() if old else Parts.of_release(release)
    with PrivateContainerd(
        shim_directory=shims, shim_config=two_gpus.config_path, parts=parts
    ) as containerd:
        if not old:
            settings["cdi-spec-dirs"] = [f"{containerd.directory}/{CDI_DIRECTORY}"]
        with PrivateDocker(containerd, DockerParts.of_release(release), settings) as docker:
            docker.import_image("glibc", glibc())
            docker.import_image("asks", glibc().named("asks", environment={DEVICES: "1"}))
            yield docker, containerd


@pytest.fixture
def docker(daemon: tuple[PrivateDocker, PrivateContainerd]) -> Iterator[PrivateDocker]:
    """Return Docker; the test fails if it leaves anything once its containers are removed."""
    docker, containerd = daemon
    with nothing_left(containerd):
        yield docker
        docker.remove_containers()
    assert not os.path.exists(docker.hook_log), "NVIDIA's hook has run"


@pytest.fixture
def modern(daemon: tuple[PrivateDocker, PrivateContainerd], docker: PrivateDocker) -> PrivateDocker:
    """Return a Docker that supports shims and CDI."""
    if "CDI" not in docker("info").stdout:
        pytest.skip("this Docker knows nothing of CDI")
    return docker


# The shim's answers do not depend on Docker's version.
NEWER: Final = pytest.mark.parametrize("daemon", ["trixie"], indirect=True)
ALWAYS: Final = ["nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"]


def shown(done: Completed) -> tuple[list[str], dict[str, str]]:
    """Return the nodes and the variables that :data:`SHOW` prints."""
    assert done.code == 0, done.stderr
    nodes = [line for line in done.lines if "=" not in line]
    variables = [line.partition("=")[::2] for line in done.lines if "=" in line]
    return sorted(nodes), dict(variables)


@pytest.mark.parametrize(
    ("flag", "devices", "nodes"),
    [
        ("1", "0", [*ALWAYS, "nvidia0"]),
        ("all,capabilities=utility", "all", ["nvidia0", "nvidia1", "nvidiactl"]),
    ],
)
def test_gpus_flag_gives_what_it_asks_and_its_hook_does_not_run(
    docker: PrivateDocker, flag: str, devices: str, nodes: list[str]
) -> None:
    seen, variables = shown(docker.run(f"--gpus={flag}", "--", "sh", "-c", f"{SHOW}; true"))
    assert seen == sorted(nodes)
    assert variables[DEVICES] == devices


@NEWER
def test_environment_asks_and_a_mount_of_null_comes_before_it(docker: PrivateDocker) -> None:
    by_user, _ = shown(docker.run("--env", f"{DEVICES}=0-0", "--", "sh", "-c", SHOW, image="asks"))
    assert by_user == ["nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidiactl"]
    mount = "--volume=/dev/null:/var/run/nvidia-container-devices/0"
    by_mount, _ = shown(docker.run(mount, "--", "sh", "-c", SHOW, image="asks"))
    assert by_mount == by_user


@pytest.fixture
def pods_cgroup(daemon: tuple[PrivateDocker, PrivateContainerd]) -> Iterator[str]:
    """Yield a cgroup that is named like a kubelet's; runtimes leave it behind."""
    name = f"{daemon[1].namespace}-kubepods"
    yield f"/{name}"
    for hierarchy in cgroup_hierarchies():
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(hierarchy, name))


@NEWER
def test_neither_a_volume_of_its_own_nor_an_image_in_a_pod_of_docker_is_a_grant(
    docker: PrivateDocker, pods_cgroup: str
) -> None:
    show = ("sh", "-c", f"{SHOW}; true")
    volume = "--volume=/var/run/nvidia-container-devices/all"  # as an image's VOLUME does
    assert shown(docker.run(volume, "--", *show))[0] == []
    # As cri-dockerd starts a pod's containers.
    pod = f"--cgroup-parent={pods_cgroup}"
    assert shown(docker.run(pod, "--", *show, image="asks")) == ([], {DEVICES: "1"})


def test_program_sees_the_gpus_and_loads_the_driver(
    docker: PrivateDocker, two_gpus: SimulatedNode
) -> None:
    script = "nvidia-smi -L && probe dlopen libcuda.so.1"
    done = docker.run("--gpus=all", "--", "sh", "-c", script)
    assert done.code == 0, done.stdout + done.stderr
    assert all(gpu.uuid in done.stdout for gpu in two_gpus.scenario.gpus)


@NEWER
def test_error_is_readable_in_what_docker_prints(docker: PrivateDocker) -> None:
    done = docker.run("--gpus=device=7", "--", "true")
    assert done.code == 125
    (line,) = (line for line in done.stderr.splitlines() if "NVSHIM" in line)
    assert "NVSHIM-E0202" in line
    assert "GPU 7" in line


def test_life_of_a_gpu_container(docker: PrivateDocker) -> None:
    name = new_name()
    docker.start_idle("--gpus=device=1", name=name)
    script = "echo $NVIDIA_CTK_LIBCUDA_DIR; probe open /dev/nvidia1 /dev/nvidia0"
    first = docker("exec", name, "sh", "-c", script)
    assert first.lines[0].startswith("/usr/lib")
    assert first.lines[1:] == ["/dev/nvidia1 ENXIO", "/dev/nvidia0 ENOENT"]
    docker("restart", "--time=0", name, check=True)
    assert docker("exec", name, "sh", "-c", script).stdout == first.stdout
    docker("exec", name, "sh", "-c", "echo logged >/proc/1/fd/1", check=True)
    assert settled(lambda: docker("logs", name).stdout, "logged\n") == "logged\n"
    docker("stop", "--time=0", name, check=True)
    assert docker("inspect", "--format={{.State.Status}}", name).stdout == "exited\n"
    docker("rm", name, check=True)


def test_named_runtime_is_our_shim(modern: PrivateDocker) -> None:
    flags = [f"--runtime={OURS}", "--gpus=device=0"]
    nodes, _ = shown(modern.run(*flags, "--", "sh", "-c", SHOW))
    assert "nvidia0" in nodes


def test_devices_that_dockers_cdi_has_given_are_not_given_again(
    daemon: tuple[PrivateDocker, PrivateContainerd], modern: PrivateDocker, two_gpus: SimulatedNode
) -> None:
    _, containerd = daemon
    directory = f"{containerd.directory}/{CDI_DIRECTORY}"
    os.makedirs(directory, exist_ok=True)
    nodes = [
        {"path": f"/dev/{name}", "hostPath": f"{two_gpus.dev}/{name}"}
        for name in ("nvidia1", "nvidiactl")
    ]
    # A spec as nvidia-ctk writes it, without the libraries.
    edits = {"deviceNodes": nodes, "env": [f"{DEVICES}=void", "FROM_CDI=yes"]}
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "1", "containerEdits": edits}],
    }
    with open(f"{directory}/nvidia.json", "w") as file:
        json.dump(spec, file)
    name = new_name()
    modern.start_idle("--device=nvidia.com/gpu=1", name=name, image="asks")
    assert modern("exec", name, "sh", "-c", SHOW).lines[:2] == ["nvidia1", "nvidiactl"]
    # An exec has the environment from before Docker's CDI; init's has the CDI edits.
    pid = modern("inspect", "--format={{.State.Pid}}", name).stdout.strip()
    with open(f"/proc/{pid}/environ") as file:
        environment = file.read().split("\0")
    assert {f"{DEVICES}=void", "FROM_CDI=yes"} <= set(environment)
    assert not any(entry.startswith("NVIDIA_CTK") for entry in environment)
    full = modern("inspect", "--format={{.Id}}", name).stdout.strip()
    assert not os.path.exists(os.path.join(containerd.bundle(full), "nvidia.json"))


def test_hooks_of_a_spec_that_docker_has_applied_do_not_run(
    daemon: tuple[PrivateDocker, PrivateContainerd],
    modern: PrivateDocker,
    two_gpus: SimulatedNode,
    tmp_path: Path,
) -> None:
    _, containerd = daemon
    directory = f"{containerd.directory}/{CDI_DIRECTORY}"
    os.makedirs(directory, exist_ok=True)
    program, log = trap(tmp_path)
    edits = {
        "deviceNodes": [{"path": "/dev/nvidia1", "hostPath": f"{two_gpus.dev}/nvidia1"}],
        "env": [f"{DEVICES}=void"],
        "mounts": [
            {"hostPath": source, "containerPath": where, "options": ["ro", "rbind"]}
            for source, where in engine_cdi.mounts(two_gpus)
        ],
        "hooks": [
            {"hookName": "createContainer", **hook} for hook in engine_cdi.hooks(two_gpus, program)
        ],
    }
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "nvidia.com/hooked",
        "devices": [{"name": "1", "containerEdits": edits}],
    }
    with open(f"{directory}/hooked.json", "w") as file:
        json.dump(spec, file)
    look = "probe dlopen libcuda.so libcuda.so.1 libnvidia-ml.so.1"
    done = modern.run("--device=nvidia.com/hooked=1", "--", "sh", "-c", look)
    assert done.code == 0, done.stdout + done.stderr
    assert len(done.lines) == 3
    assert not log.exists()


def test_container_without_gpu_has_the_spec_that_docker_wrote(
    daemon: tuple[PrivateDocker, PrivateContainerd], docker: PrivateDocker
) -> None:
    _, containerd = daemon
    name = new_name()
    docker.start_idle(name=name)
    full = docker("inspect", "--format={{.Id}}", name).stdout.strip()
    bundle = containerd.bundle(full)
    assert os.path.exists(os.path.join(bundle, "config.json"))
    assert not os.path.exists(os.path.join(bundle, "nvidia.json"))
