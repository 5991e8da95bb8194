"""NVIDIA's driver, its GPUs, its device nodes and its services: D001 to D016."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.facts import seen
from integration.doctor.findings import Check, Severity, Trouble, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Node

__all__ = ["DRIVER"]

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

# A GPU whose driver has to wake it answers after this many seconds.
_SLOW: Final = 2.0
_RESET: Final = "nvidia-smi --gpu-reset"


def _no_driver(node: Node) -> Iterator[Trouble]:
    driver = seen(node.driver)
    meant = any(gpu.driver != "vfio-pci" for gpu in driver.pci)
    if not driver.fault or driver.mismatch:
        return
    if meant or driver.module:
        yield Trouble(driver.fault)
    elif not driver.pci:
        yield Trouble(
            f"{driver.fault}; and there is no GPU of NVIDIA's on the PCI bus",
            severity=_NOTE,
            remedy="nothing, if this node is to have none",
        )


def _mismatch(node: Node) -> Iterator[Trouble]:
    driver = seen(node.driver)
    if driver.mismatch:
        yield Trouble(f"the kernel module is {driver.module}; {driver.fault}")


def _several(node: Node) -> Iterator[Trouble]:
    driver = seen(node.driver)
    others = [i for i in driver.installed if (i.version, i.root) != (driver.version, driver.root)]
    if driver.version and others:
        names = listed(f"{i.version} below {i.root}" for i in others)
        yield Trouble(f"{driver.version} below {driver.root} is used; there is also {names}")


def _no_gpu(node: Node) -> Iterator[Trouble]:
    driver = seen(node.driver)
    for path, why in driver.lost:
        yield Trouble(f"{path}: {why}")
    bound = [gpu for gpu in driver.pci if gpu.driver not in {"vfio-pci", "nouveau"}]
    if driver.gpus or driver.platform_faults:
        return
    if bound and driver.module:
        yield Trouble(f"{len(bound)} on the PCI bus ({listed(g.bus_id for g in bound)}), none here")
    elif not driver.pci and driver.version and driver.module:
        yield Trouble(
            "the driver is loaded, and there is no GPU of NVIDIA's on the PCI bus",
            severity=_NOTE,
            remedy="nothing, if this node is to have none",
        )


def _nvml(node: Node) -> Iterator[Trouble]:
    nvml = seen(node.nvml)
    if nvml is None:
        return
    if nvml.failure:
        yield Trouble(nvml.failure)
    for lost in nvml.lost:
        yield Trouble(lost, remedy="reset the GPU, or reboot the node", command=_RESET)
    if nvml.notes:
        yield Trouble(listed(nvml.notes), severity=_WARNING)
    if not nvml.failure and nvml.seconds > min(_SLOW, nvml.limit / 2):
        yield Trouble(
            f"it answered after {nvml.seconds:g} s, and may take {nvml.limit:g} s",
            severity=_WARNING,
            remedy="keep the driver initialised, or raise nvml-timeout in [node] of config.toml",
        )


def _conflicts(node: Node) -> Iterator[Trouble]:
    nvml = seen(node.nvml)
    for conflict in nvml.conflicts if nvml is not None else ():
        yield Trouble(conflict)


def _persistence(node: Node) -> Iterator[Trouble]:
    nvml = seen(node.nvml)
    if nvml is not None and nvml.persistence == "off":
        yield Trouble("no nvidia-persistenced runs, and persistence mode is off")


def _modules(node: Node) -> Iterator[Trouble]:
    driver, policy = seen(node.driver), seen(node.policy)
    if not driver.version or all(gpu.driver == "vfio-pci" for gpu in driver.pci):
        return
    wanted = ("nvidia", "nvidia_uvm", "nvidia_modeset")
    missing = [name for name in wanted if name not in driver.modules]
    if not missing or (driver.module is None and "nvidia" not in missing):
        return
    needed = {"nvidia", "nvidia_uvm"} & set(missing)
    severity = _ERROR if needed and not policy.load_modules else _NOTE
    if "nvidia" in missing and "nouveau" in driver.modules:
        severity = _ERROR
    names = " ".join(name.replace("_", "-") for name in missing)
    who = "loaded when a container needs them" if policy.load_modules else "not loaded by anybody"
    yield Trouble(
        f"{names} ({who})",
        severity=severity,
        remedy="load them at boot: name them in a file of /etc/modules-load.d",
        command=f"modprobe --all {names}",
    )


def _nodes_missing(node: Node) -> Iterator[Trouble]:
    driver, policy = seen(node.driver), seen(node.policy)
    missing = [path for path in driver.missing_nodes if path.startswith("/dev/nvidia")]
    if not missing or not driver.gpus:
        return
    made = policy.make_nodes and driver.may_make_nodes
    yield Trouble(
        f"{listed(missing)} ({'made when a container needs them' if made else 'made by nobody'})",
        severity=_WARNING if made else _ERROR,
    )


def _nodes_wrong(node: Node) -> Iterator[Trouble]:
    for path, fault in seen(node.driver).wrong_nodes:
        yield Trouble(f"{path}: {fault}")


def _char_links(node: Node) -> Iterator[Trouble]:
    driver, machine, policy = seen(node.driver), seen(node.machine), seen(node.policy)
    if driver.char_links and machine.systemd:
        made = " (made when a container is given the device)" if policy.char_links else ""
        yield Trouble(
            f"no right link /dev/char/{listed(driver.char_links)}{made}",
            severity=_NOTE if policy.char_links else _WARNING,
            command="nvshim devices create",
            remedy="make the links at boot, for containers that others make as well",
        )


def _nouveau(node: Node) -> Iterator[Trouble]:
    driver = seen(node.driver)
    bound = [gpu.bus_id for gpu in driver.pci if gpu.driver in {"nouveau", "nova_core"}]
    if bound:
        yield Trouble(f"{listed(bound)}: bound to the kernel's own driver")
    elif "nouveau" in driver.modules and driver.pci:
        yield Trouble("the module is loaded, and has no GPU yet", severity=_WARNING)


def _vfio(node: Node) -> Iterator[Trouble]:
    bound = [gpu.bus_id for gpu in seen(node.driver).pci if gpu.driver == "vfio-pci"]
    if bound:
        yield Trouble(f"{listed(bound)}: bound to vfio-pci")


def _mps(node: Node) -> Iterator[Trouble]:
    driver = seen(node.driver)
    if driver.mps_pipe and not driver.mps_runs:
        yield Trouble(f"{driver.mps_pipe}/control is there, and no nvidia-cuda-mps-control runs")


def _imex(node: Node) -> Iterator[Trouble]:
    driver = seen(node.driver)
    if driver.imex and not driver.imex_channels:
        yield Trouble("the driver has IMEX channels, and there is no node of one")


def _platform(node: Node) -> Iterator[Trouble]:
    for fault in seen(node.driver).platform_faults:
        yield Trouble(fault)


_NEEDS: Final = ("driver",)
_TROUBLESHOOTING: Final = (
    "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html"
)

DRIVER: Final = (
    Check(
        code="NVSHIM-D001",
        severity=_ERROR,
        title="the driver's libraries are not found",
        why="A container is given the host's libraries: without them it has no CUDA, and every "
        "container that asks for a GPU is refused.",
        remedy="install the driver's user-space libraries, or set driver-root in [node] of "
        "config.toml to where they are",
        needs=_NEEDS,
        look=_no_driver,
    ),
    Check(
        code="NVSHIM-D002",
        severity=_ERROR,
        title="libraries and kernel module of the driver are of different versions",
        why="Every NVIDIA program ends with a version mismatch. It is the usual end of an update "
        "of the driver without a boot.",
        remedy="restart the node, or end all that uses the GPUs and load the module anew",
        needs=_NEEDS,
        look=_mismatch,
    ),
    Check(
        code="NVSHIM-D003",
        severity=_NOTE,
        title="several versions of the driver are installed",
        why="The one of the loaded kernel module is used. Tools that search differently find "
        "another, and the next boot may load the other module.",
        remedy="remove the others, or set driver-root in [node] of config.toml",
        needs=_NEEDS,
        look=_several,
    ),
    Check(
        code="NVSHIM-D004",
        severity=_ERROR,
        title="the driver does not show a GPU that is there, or has lost one",
        why="A GPU that has fallen off the bus, or that the driver refuses, is nobody's.",
        remedy="see the kernel's log for NVRM and Xid lines; reset the GPU or restart the node",
        command="dmesg | grep -E 'NVRM|Xid'",
        needs=_NEEDS,
        look=_no_gpu,
    ),
    Check(
        code="NVSHIM-D005",
        severity=_ERROR,
        title="NVML does not answer as it should",
        why="Without NVML there are no MIG devices, and GPUs are known by what procfs says.",
        remedy="see that nvidia-smi works on the node, and the kernel's log for Xid lines",
        command="nvidia-smi",
        needs=("nvml",),
        look=_nvml,
    ),
    Check(
        code="NVSHIM-D006",
        severity=_WARNING,
        title="the driver does not stay initialised",
        why="With nobody using a GPU the driver shuts it down; the next container waits for "
        "seconds until it is awake, and settings of nvidia-smi are lost.",
        remedy="run nvidia-persistenced",
        command="systemctl enable --now nvidia-persistenced",
        reference="https://docs.nvidia.com/deploy/driver-persistence/",
        needs=("nvml",),
        look=_persistence,
    ),
    Check(
        code="NVSHIM-D007",
        severity=_ERROR,
        title="kernel modules of the driver are not loaded",
        why="CUDA needs nvidia-uvm, graphics need nvidia-modeset.",
        remedy="load them at boot",
        needs=("driver", "policy"),
        look=_modules,
    ),
    Check(
        code="NVSHIM-D008",
        severity=_WARNING,
        title="device nodes of the driver are missing",
        why="No kernel makes these nodes: nvidia-modprobe, nvidia-smi or we do, when somebody "
        "needs them. Engines that read CDI specs do not.",
        remedy="make them at boot",
        command="nvshim devices create",
        needs=("driver", "policy"),
        look=_nodes_missing,
    ),
    Check(
        code="NVSHIM-D009",
        severity=_ERROR,
        title="a device node is not what it should be",
        why="nvidia-uvm and nvidia-caps have other numbers after their module is loaded anew; a "
        "node of before leads to nobody, or to another driver. It is given to no container.",
        remedy="remove the node, then make it anew",
        command="nvshim devices create",
        needs=_NEEDS,
        look=_nodes_wrong,
    ),
    Check(
        code="NVSHIM-D010",
        severity=_WARNING,
        title="links in /dev/char are missing",
        why="systemd knows devices by these links. Where one is missing, `systemctl daemon-reload` "
        "takes the GPU from a running container: Failed to initialize NVML: Unknown Error.",
        remedy="make the links at boot",
        command="nvshim devices create",
        reference="https://github.com/NVIDIA/nvidia-container-toolkit/issues/48",
        needs=("driver", "machine", "policy"),
        look=_char_links,
    ),
    Check(
        code="NVSHIM-D011",
        severity=_ERROR,
        title="nouveau has the GPU",
        why="NVIDIA's driver cannot have it then.",
        remedy="keep nouveau from loading (`blacklist nouveau`, `options nouveau modeset=0` in a "
        "file of /etc/modprobe.d), make the initramfs anew, restart",
        needs=_NEEDS,
        look=_nouveau,
    ),
    Check(
        code="NVSHIM-D012",
        severity=_NOTE,
        title="a GPU is set aside for virtual machines",
        why="Containers cannot have it.",
        remedy="nothing, if it is meant for virtual machines",
        needs=_NEEDS,
        look=_vfio,
    ),
    Check(
        code="NVSHIM-D013",
        severity=_WARNING,
        title="MPS's pipe is there without its daemon",
        why="CUDA programs that find the pipe wait for a daemon that is gone.",
        remedy="start nvidia-cuda-mps-control, or remove the directory",
        command="nvidia-cuda-mps-control -d",
        needs=_NEEDS,
        look=_mps,
    ),
    Check(
        code="NVSHIM-D014",
        severity=_NOTE,
        title="there is no IMEX channel",
        why="Containers that share memory across nodes ask for a channel, and are refused.",
        remedy="start nvidia-imex, or load the module with NVreg_CreateImexChannel0=1",
        needs=_NEEDS,
        look=_imex,
    ),
    Check(
        code="NVSHIM-D015",
        severity=_ERROR,
        title="files of this platform are missing",
        why="On Tegra the lists of files (*.csv), on WSL libdxcore and /dev/dxg say what a "
        "container is given.",
        remedy="install nvidia-l4t-init (Tegra), or update WSL",
        reference=_TROUBLESHOOTING,
        needs=_NEEDS,
        look=_platform,
    ),
    Check(
        code="NVSHIM-D016",
        severity=_ERROR,
        title="NVML and the kernel module say different things of the GPUs",
        why="What a container is given goes by the kernel module, what nvidia-smi and CUDA see by "
        "NVML: a container may get another GPU than it was meant to, or none.",
        remedy="if the driver was updated, restart the node or load the module anew; otherwise see "
        "the kernel's log for NVRM and Xid lines",
        command="dmesg | grep -E 'NVRM|Xid'",
        needs=("nvml",),
        look=_conflicts,
    ),
)
