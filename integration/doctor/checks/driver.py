"""NVIDIA's driver, its GPUs, its device nodes and its services: D001 to D017."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hooks.node.drained import DRIVER
from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Driver, Machine, Nvml, Policy

# A GPU whose driver has to wake it answers after this many seconds.
_SLOW: Final = 2.0
_RESET: Final = "nvidia-smi --gpu-reset"
_TROUBLESHOOTING: Final = (
    "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html"
)


@check(
    "NVSHIM-D001",
    ERROR,
    "the driver's libraries are not found",
    why=(
        "A container is given the host's libraries: without them it has no CUDA, and every "
        "container that asks for a GPU is refused."
    ),
    remedy=(
        "install the driver's user-space libraries, or set driver-root in [node] of "
        "config.toml to where they are"
    ),
)
def _no_driver(driver: Driver) -> Iterator[Trouble]:
    meant = any(gpu.driver != "vfio-pci" for gpu in driver.pci)
    if not driver.fault or driver.mismatch:
        return
    if meant or driver.module:
        yield Trouble(driver.fault)
    elif not driver.pci:
        yield Trouble(
            f"{driver.fault}; and there is no GPU of NVIDIA's on the PCI bus",
            severity=NOTE,
            remedy="nothing, if this node is to have none",
        )


@check(
    "NVSHIM-D002",
    ERROR,
    "libraries and kernel module of the driver are of different versions",
    why=(
        "Every NVIDIA program ends with a version mismatch. It is the usual end of an update "
        "of the driver without a boot."
    ),
    remedy="restart the node, or end all that uses the GPUs and load the module anew",
)
def _mismatch(driver: Driver) -> Iterator[Trouble]:
    if driver.mismatch:
        yield Trouble(f"the kernel module is {driver.module}; {driver.fault}")


@check(
    "NVSHIM-D003",
    NOTE,
    "several versions of the driver are installed",
    why=(
        "The one of the loaded kernel module is used. Tools that search differently find "
        "another, and the next boot may load the other module."
    ),
    remedy="remove the others, or set driver-root in [node] of config.toml",
)
def _several(driver: Driver) -> Iterator[Trouble]:
    others = [i for i in driver.installed if (i.version, i.root) != (driver.version, driver.root)]
    if driver.version and others:
        names = listed(f"{i.version} below {i.root}" for i in others)
        yield Trouble(f"{driver.version} below {driver.root} is used; there is also {names}")


@check(
    "NVSHIM-D004",
    ERROR,
    "the driver does not show a GPU that is there, or has lost one",
    why="A GPU that has fallen off the bus, or that the driver refuses, is nobody's.",
    remedy="see the kernel's log for NVRM and Xid lines; reset the GPU or restart the node",
    command="dmesg | grep -E 'NVRM|Xid'",
)
def _no_gpu(driver: Driver) -> Iterator[Trouble]:
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
            severity=NOTE,
            remedy="nothing, if this node is to have none",
        )


@check(
    "NVSHIM-D005",
    ERROR,
    "NVML does not answer as it should",
    why="Without NVML there are no MIG devices, and GPUs are known by what procfs says.",
    remedy="see that nvidia-smi works on the node, and the kernel's log for Xid lines",
    command="nvidia-smi",
)
def _nvml(nvml: Nvml) -> Iterator[Trouble]:
    if nvml.failure:
        yield Trouble(nvml.failure)
    for lost in nvml.lost:
        yield Trouble(lost, remedy="reset the GPU, or reboot the node", command=_RESET)
    if nvml.notes:
        yield Trouble(listed(nvml.notes), severity=WARNING)
    if not nvml.failure and nvml.seconds > min(_SLOW, nvml.limit / 2):
        yield Trouble(
            f"it answered after {nvml.seconds:g} s, and may take {nvml.limit:g} s",
            severity=WARNING,
            remedy="keep the driver initialised, or raise nvml-timeout in [node] of config.toml",
        )


@check(
    "NVSHIM-D016",
    ERROR,
    "NVML and the kernel module say different things of the GPUs",
    why=(
        "What a container is given goes by the kernel module, what nvidia-smi and CUDA see by "
        "NVML: a container may get another GPU than it was meant to, or none."
    ),
    remedy=(
        "if the driver was updated, restart the node or load the module anew; otherwise see "
        "the kernel's log for NVRM and Xid lines"
    ),
    command="dmesg | grep -E 'NVRM|Xid'",
)
def _conflicts(nvml: Nvml) -> Iterator[Trouble]:
    for conflict in nvml.conflicts:
        yield Trouble(conflict)


@check(
    "NVSHIM-D006",
    WARNING,
    "the driver does not stay initialised",
    why=(
        "With nobody using a GPU the driver shuts it down; the next container waits for "
        "seconds until it is awake, and settings of nvidia-smi are lost."
    ),
    remedy="run nvidia-persistenced",
    command="systemctl enable --now nvidia-persistenced",
    reference="https://docs.nvidia.com/deploy/driver-persistence/",
)
def _persistence(nvml: Nvml) -> Iterator[Trouble]:
    if nvml.persistence == "off":
        yield Trouble("no nvidia-persistenced runs, and persistence mode is off")


@check(
    "NVSHIM-D007",
    ERROR,
    "kernel modules of the driver are not loaded",
    why="CUDA needs nvidia-uvm, graphics need nvidia-modeset.",
    remedy="load them at boot",
)
def _modules(driver: Driver, policy: Policy) -> Iterator[Trouble]:
    if not driver.version or all(gpu.driver == "vfio-pci" for gpu in driver.pci):
        return
    wanted = ("nvidia", "nvidia_uvm", "nvidia_modeset")
    missing = [name for name in wanted if name not in driver.modules]
    if not missing or (driver.module is None and "nvidia" not in missing):
        return
    needed = {"nvidia", "nvidia_uvm"} & set(missing)
    severity = ERROR if needed and not policy.load_modules else NOTE
    if "nvidia" in missing and "nouveau" in driver.modules:
        severity = ERROR
    names = " ".join(name.replace("_", "-") for name in missing)
    who = "loaded when a container needs them" if policy.load_modules else "not loaded by anybody"
    yield Trouble(
        f"{names} ({who})",
        severity=severity,
        remedy="load them at boot: name them in a file of /etc/modules-load.d",
        command=f"modprobe --all {names}",
    )


@check(
    "NVSHIM-D008",
    WARNING,
    "device nodes of the driver are missing",
    why=(
        "No kernel makes these nodes: nvidia-modprobe, nvidia-smi or we do, when somebody "
        "needs them. Engines that read CDI specs do not."
    ),
    remedy="make them at boot",
    command="nvshim devices create",
)
def _nodes_missing(driver: Driver, policy: Policy) -> Iterator[Trouble]:
    missing = [path for path in driver.missing_nodes if path.startswith("/dev/nvidia")]
    if not missing or not driver.gpus:
        return
    made = policy.make_nodes and driver.may_make_nodes
    yield Trouble(
        f"{listed(missing)} ({'made when a container needs them' if made else 'made by nobody'})",
        severity=WARNING if made else ERROR,
    )


@check(
    "NVSHIM-D009",
    ERROR,
    "a device node is not what it should be",
    why=(
        "nvidia-uvm and nvidia-caps have other numbers after their module is loaded anew; a "
        "node of before leads to nobody, or to another driver. It is given to no container."
    ),
    remedy="remove the node, then make it anew",
    command="nvshim devices create",
)
def _nodes_wrong(driver: Driver) -> Iterator[Trouble]:
    for path, fault in driver.wrong_nodes:
        yield Trouble(f"{path}: {fault}")


@check(
    "NVSHIM-D010",
    WARNING,
    "links in /dev/char are missing",
    why=(
        "systemd knows devices by these links. Where one is missing, `systemctl daemon-reload` "
        "takes the GPU from a running container: Failed to initialize NVML: Unknown Error."
    ),
    remedy="make the links at boot",
    command="nvshim devices create",
    reference="https://github.com/NVIDIA/nvidia-container-toolkit/issues/48",
)
def _char_links(driver: Driver, machine: Machine, policy: Policy) -> Iterator[Trouble]:
    if driver.char_links and machine.systemd:
        made = " (made when a container is given the device)" if policy.char_links else ""
        yield Trouble(
            f"no right link /dev/char/{listed(driver.char_links)}{made}",
            severity=NOTE if policy.char_links else WARNING,
            command="nvshim devices create",
            remedy="make the links at boot, for containers that others make as well",
        )


@check(
    "NVSHIM-D011",
    ERROR,
    "nouveau has the GPU",
    why="NVIDIA's driver cannot have it then.",
    remedy=(
        "keep nouveau from loading (`blacklist nouveau`, `options nouveau modeset=0` in a "
        "file of /etc/modprobe.d), make the initramfs anew, restart"
    ),
)
def _nouveau(driver: Driver) -> Iterator[Trouble]:
    bound = [gpu.bus_id for gpu in driver.pci if gpu.driver in {"nouveau", "nova_core"}]
    if bound:
        yield Trouble(f"{listed(bound)}: bound to the kernel's own driver")
    elif "nouveau" in driver.modules and driver.pci:
        yield Trouble("the module is loaded, and has no GPU yet", severity=WARNING)


@check(
    "NVSHIM-D012",
    NOTE,
    "a GPU is set aside for virtual machines",
    why="Containers cannot have it.",
    remedy="nothing, if it is meant for virtual machines",
)
def _vfio(driver: Driver) -> Iterator[Trouble]:
    bound = [gpu.bus_id for gpu in driver.pci if gpu.driver == "vfio-pci"]
    if bound:
        yield Trouble(f"{listed(bound)}: bound to vfio-pci")


@check(
    "NVSHIM-D013",
    WARNING,
    "MPS's pipe is there without its daemon",
    why="CUDA programs that find the pipe wait for a daemon that is gone.",
    remedy="start nvidia-cuda-mps-control, or remove the directory",
    command="nvidia-cuda-mps-control -d",
)
def _mps(driver: Driver) -> Iterator[Trouble]:
    if driver.mps_pipe and not driver.mps_runs:
        yield Trouble(f"{driver.mps_pipe}/control is there, and no nvidia-cuda-mps-control runs")


@check(
    "NVSHIM-D014",
    NOTE,
    "there is no IMEX channel",
    why="Containers that share memory across nodes ask for a channel, and are refused.",
    remedy="start nvidia-imex, or load the module with NVreg_CreateImexChannel0=1",
)
def _imex(driver: Driver) -> Iterator[Trouble]:
    if driver.imex and not driver.imex_channels:
        yield Trouble("the driver has IMEX channels, and there is no node of one")


@check(
    "NVSHIM-D015",
    ERROR,
    "files of this platform are missing",
    why=(
        "On Tegra the lists of files (*.csv), on WSL libdxcore and /dev/dxg say what a "
        "container is given."
    ),
    remedy="install nvidia-l4t-init (Tegra), or update WSL",
    reference=_TROUBLESHOOTING,
)
def _platform(driver: Driver) -> Iterator[Trouble]:
    for fault in driver.platform_faults:
        yield Trouble(fault)


@check(
    "NVSHIM-D017",
    WARNING,
    "a device is out of service",
    why=(
        "A person has taken it out of service, or a reset that has not ended: no new container "
        "gets it, and the kubelet counts it as unhealthy. Nothing but a person returns it."
    ),
    remedy="return it to service when the work is done",
    command="nvshim undrain DEVICE",
)
def _drained(driver: Driver) -> Iterator[Trouble]:
    for device, why, reset in driver.drained:
        command = "nvshim undrain " + ("--driver" if device == DRIVER else device)
        line = f"{device} is out of service {why}"
        if reset:
            yield Trouble(
                f"{line}; a reset came so far: {reset}",
                remedy="wait for the `nvshim reset` that runs, or run it again",
                command=f"nvshim reset {device}",
            )
        else:
            yield Trouble(line, command=command)
