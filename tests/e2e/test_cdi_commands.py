"""``nvshim cdi``, ``devices`` and ``compat`` as processes, on simulated nodes with real drivers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from hooks.cdi import schema
from hooks.node.roots import cuda_of_branch
from integration import exits
from integration.engines import podman
from integration.simulated import Scenario, SimulatedNode
from tests.harness.launcher import REPOSITORY
from tests.harness.runtime import Runtime
from tools.images import GLIBC

UNITS = os.path.join(REPOSITORY, "integration", "systemd")


class Commands:
    """nvshim, and links to it under the names of NVIDIA's commands."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        os.mkdir(directory)
        program = f"{directory}/nvshim"
        with open(program, "w", encoding="utf-8") as file:
            file.write(
                f"#!{sys.executable} -B\nimport sys\nsys.path.insert(0, {REPOSITORY!r})\n"
                "from integration.cli.app import main\nsys.exit(main())\n"
            )
        os.chmod(program, 0o755)
        for name in ("nvidia-ctk", "nvidia-container-cli"):
            os.symlink("nvshim", f"{directory}/{name}")

    def run(
        self, node: SimulatedNode | None, *words: str, status: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of them."""
        known = {"PATH": f"{self.directory}:/usr/sbin:/usr/bin:/sbin:/bin", **environment}
        if node is not None:
            known["NVSHIM_CONFIG"] = node.config_path
        done = subprocess.run(
            [f"{self.directory}/{words[0]}", *words[1:]],
            env=known, capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr + done.stdout
        return done


@pytest.fixture(scope="module")
def commands(workshop: str) -> Commands:
    return Commands(f"{workshop}/commands")


@pytest.fixture(scope="module")
def mig(workshop: str) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/commands-mig", Scenario.load("mig")) as node:
        yield node


@pytest.fixture(scope="module")
def full(workshop: str) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/commands-full", Scenario.load("full")) as node:
        yield node


# -- nvidia-container-cli -------------------------------------------------------------------


def test_info_is_what_the_original_prints(commands: Commands, two_gpus: SimulatedNode) -> None:
    done = commands.run(two_gpus, "nvidia-container-cli", "-k", "-d", "/dev/stderr", "info")
    driver = two_gpus.driver_version
    blocks = [f"NVRM version:   {driver}\nCUDA version:   {cuda_of_branch(driver)}\n"]
    for gpu in two_gpus.scenario.gpus:
        domain, _, rest = gpu.pci.partition(":")
        blocks.append(
            f"Device Index:   {gpu.index}\n"
            f"Device Minor:   {gpu.index}\n"
            f"Model:          {gpu.model.name}\n"
            "Brand:          Nvidia\n"
            f"GPU UUID:       {gpu.uuid}\n"
            f"Bus Location:   {domain:0>8}:{rest.upper()}\n"
            "Architecture:   9.0\n"
        )
    assert done.stdout == "\n".join(blocks)
    assert "selecting" in done.stderr
    lines = commands.run(two_gpus, "nvidia-container-cli", "info", "--csv").stdout.splitlines()
    assert lines[0] == "NVRM version,CUDA version"
    assert len(lines) == 4 + len(two_gpus.scenario.gpus)


def test_list_is_what_the_original_prints(commands: Commands, mig: SimulatedNode) -> None:
    lines = commands.run(mig, "nvidia-container-cli", "list").stdout.splitlines()
    control = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]
    nodes = [f"/dev/{name}" for name in (*control, *(f"nvidia{n}" for n in range(4)))]
    assert lines[: len(nodes)] == nodes
    capabilities = lines[len(nodes) : len(nodes) + 4 * 10]
    access = "/proc/driver/nvidia/capabilities"
    for first, second, third, fourth in zip(*[iter(capabilities)] * 4, strict=True):
        assert re.fullmatch(rf"{access}/gpu[01]/mig/gi\d+/access", first)
        assert re.fullmatch(rf"{access}/gpu[01]/mig/gi\d+/ci\d+/access", second)
        assert re.fullmatch(r"/dev/nvidia-caps/nvidia-cap\d+", third)
        assert os.path.exists(mig.dev + fourth.removeprefix("/dev"))
    files = lines[len(nodes) + 4 * 10 :]
    assert files[0] == "/usr/bin/nvidia-smi"
    assert all(os.path.isfile(mig.driver_root + path) for path in files)
    version = mig.driver_version
    assert f"/usr/lib/x86_64-linux-gnu/libcuda.so.{version}" in files
    assert files[-1] == f"/lib/firmware/nvidia/{version}/gsp_tu10x.bin"
    words = ["list", "--binaries", "--ipcs", "--libraries"]
    some = commands.run(mig, "nvidia-container-cli", *words).stdout.splitlines()
    assert some == [path for path in files if "firmware" not in path]
    done = commands.run(mig, "nvidia-container-cli", "list", "-d", "9", status=exits.FAILED)
    assert (done.stdout, done.stderr[:12]) == ("", "NVSHIM-E0202")


def test_a_node_with_everything_lists_and_generates_everything(
    commands: Commands, full: SimulatedNode, tmp_path: Path
) -> None:
    every = commands.run(full, "nvidia-container-cli", "list").stdout
    assert f"/i386-linux-gnu/libcuda.so.{full.driver_version}" in every
    for mode, kind in (("gds", "nvidia.com/gds"), ("management", "management.nvidia.com/gpu"),
                       ("imex", "nvidia.com/imex-channel")):  # fmt: skip
        path = f"{tmp_path}/{mode}.json"
        commands.run(full, "nvidia-ctk", "cdi", "generate", f"--mode={mode}", f"--output={path}")
        with open(path, encoding="utf-8") as file:
            assert schema.parse(json.load(file), path).kind == kind
    # Device nodes come from the simulated node's dev.
    commands.run(full, "nvshim", "cdi", "validate", f"{tmp_path}/management.json")


# -- CDI specs ------------------------------------------------------------------------------


def test_spec_gives_a_container_its_mig_device_and_goes_stale_with_the_driver(
    commands: Commands,
    mig: SimulatedNode,
    runtime: Runtime,
    configure: Callable[..., None],
    tmp_path: Path,
) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of CDI")
    specs = f"{tmp_path}/specs"
    configure(f'[cdi]\nspec-dirs = ["{specs}"]\n', node=mig)
    # Another class: nvidia.com/gpu is resolved live.
    generate = ["nvidia-ctk", "cdi", "generate", "--class=exported"]
    output = f"{specs}/nvidia.yaml"
    done = commands.run(mig, *generate, NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=output)
    # This machine's old Podman cannot read groups in a spec.
    version = "0.5.0" if podman.too_old() else "0.7.0"
    assert f'level=info msg="Generated CDI spec with version {version}"' in done.stderr
    listed = commands.run(mig, "nvidia-ctk", "cdi", "list", "--spec-dir", specs)
    assert "nvidia.com/exported=1:0\n" in listed.stdout
    assert listed.stdout.splitlines() == sorted(listed.stdout.splitlines())
    assert 'level=info msg="Found 23 CDI devices"' in listed.stderr
    validate = ["nvshim", "cdi", "validate", "--spec-dir", specs, "-o", "json"]
    (checked,) = json.loads(commands.run(mig, *validate).stdout)["items"]
    assert checked["findings"] == []
    device = next(
        each["containerEdits"]["deviceNodes"]
        for each in yaml.safe_load((tmp_path / "specs/nvidia.yaml").read_text())["devices"]
        if each["name"] == "1:0"
    )
    seen = runtime.run(
        "sh", "-c", "probe dlopen libcuda.so.1 libnvidia-ml.so.1; ls -1 /dev/nvidia*",
        image=GLIBC,
        flags=("--annotation", "cdi.k8s.io/test=nvidia.com/exported=1:0"),
    )  # fmt: skip
    assert seen.code == 0, seen.stderr
    found = [line.split()[1] for line in seen.lines if ".so.1 " in line]
    assert [os.path.basename(path) for path in found] == ["libcuda.so.1", "libnvidia-ml.so.1"]
    shown = {os.path.basename(node["path"]) for node in device}
    assert len(shown) == 3
    assert shown <= {os.path.basename(line) for line in seen.lines}
    assert "/dev/nvidia0" not in seen.lines
    library = f"{mig.driver_root}/usr/lib/x86_64-linux-gnu/libcuda.so.{mig.driver_version}"
    os.rename(library, f"{library}.away")
    try:
        (checked,) = json.loads(commands.run(mig, *validate, status=exits.FOUND).stdout)["items"]
    finally:
        os.rename(f"{library}.away", library)
    assert {(each["what"], each["subject"]) for each in checked["findings"]} == {
        ("missing", library)
    }
    root = ["cdi", "transform", "root", f"--input={specs}/nvidia.yaml", "--to=/host"]
    moved = commands.run(mig, "nvidia-ctk", *root, f"--from={mig.driver_root}").stdout
    sources = {each["hostPath"] for each in yaml.safe_load(moved)["containerEdits"]["mounts"]}
    assert all(source.startswith("/host/") for source in sources)


# -- nodes and links ------------------------------------------------------------------------


def test_nodes_and_links_are_made_after_a_boot(commands: Commands, mig: SimulatedNode) -> None:
    before = {name: os.lstat(f"{mig.dev}/{name}") for name in ("nvidiactl", "nvidia3")}
    caps = sorted(os.listdir(f"{mig.dev}/nvidia-caps"))
    for name in ("nvidiactl", "nvidia3", "nvidia-uvm"):
        os.unlink(f"{mig.dev}/{name}")
    shutil.rmtree(f"{mig.dev}/nvidia-caps")
    create = ["nvshim", "devices", "create", "-o", "json"]
    would = json.loads(commands.run(mig, *create, "--dry-run", status=exits.FOUND).stdout)["items"]
    assert not os.path.exists(f"{mig.dev}/nvidiactl")
    rows = json.loads(commands.run(mig, *create, "--load-kernel-modules").stdout)["items"]
    for name, seen in before.items():
        again = os.lstat(f"{mig.dev}/{name}")
        assert (again.st_mode, again.st_rdev) == (seen.st_mode, seen.st_rdev)
    assert sorted(os.listdir(f"{mig.dev}/nvidia-caps")) == caps
    absent = {row["path"] for row in would if row["state"] == "absent"}
    made = {row["path"]: row["kind"] for row in rows if row["state"] == "made"}
    assert made.keys() <= absent  # a dangling link may be valid again
    assert len([kind for kind in made.values() if kind == "node"]) == 3 + len(caps)
    links = [row for row in rows if row["kind"] == "link"]
    assert {os.stat(row["path"]).st_rdev for row in links} == {
        os.makedev(*map(int, row["numbers"].split(":"))) for row in links
    }
    rows = json.loads(commands.run(mig, *create).stdout)["items"]
    assert {row["state"] for row in rows} == {"present"}
    os.unlink(f"{mig.dev}/char/195:255")
    commands.run(mig, "nvidia-ctk", "system", "create-dev-char-symlinks")
    assert os.readlink(f"{mig.dev}/char/195:255") == "../nvidiactl"


# -- runtime configure ----------------------------------------------------------------------


def test_runtime_configure_writes_what_nvshim_configure_writes(
    commands: Commands, tmp_path: Path, shim_directory: str
) -> None:
    shim = os.path.join(shim_directory, "containerd-shim-nvidia-v1")
    config = tmp_path / "config.toml"
    config.write_text("version = 2\n")
    words = ["runtime", "configure", "--runtime=containerd", f"--config={config}",
             f"--nvidia-runtime-path={shim}", "--nvidia-set-as-default=true"]  # fmt: skip
    done = commands.run(None, "nvidia-ctk", *words, "--dry-run")
    assert config.read_text() == "version = 2\n"
    assert "io.containerd.nvidia.v1" in done.stdout
    done = commands.run(None, "nvidia-ctk", *words)
    assert "It is recommended that containerd daemon be restarted." in done.stderr
    written = "".join(path.read_text() for path in tmp_path.rglob("*.toml"))
    assert "io.containerd.nvidia.v1" in written
    assert 'default_runtime_name = "nvidia"' in written


# -- systemd --------------------------------------------------------------------------------


def test_systemd_understands_the_units_that_keep_the_spec(
    commands: Commands, tmp_path: Path
) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    for name in ("nvshim-cdi-refresh.service", "nvshim-cdi-refresh.path"):
        with open(os.path.join(UNITS, name), encoding="utf-8") as file:
            text = file.read()
        program = f"{commands.directory}/nvshim"
        (tmp_path / name).write_text(text.replace("/usr/local/bin/nvshim", program))
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.glob("nvshim-*"))],
        capture_output=True, text=True, check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    # The words of the service, as systemd would start them.
    service = (tmp_path / "nvshim-cdi-refresh.service").read_text()
    (words,) = re.findall(r"^ExecStart=(.*)$", service, re.MULTILINE)
    commands.run(None, "nvshim", *words.split()[1:], "--help")
    # Reaching a start limit stops the path unit, too.
    assert "\nStartLimitIntervalSec=0\n" in service
