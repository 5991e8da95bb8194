"""NVIDIA's driver, its GPUs, device nodes and services: D001 to D019."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from hooks.node.drained import DRIVER
from integration.devices.drain_marks import OF_MIG
from integration.doctor.facts import Driver, Machine, Nvml, Policy
from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check, listed

# NVML needs this many seconds if the driver must first initialise the GPU.
_SLOW: Final = 2.0
_RESET: Final = "nvidia-smi --gpu-reset"


@check("D001")
def _no_driver(driver: Driver) -> Iterator[Trouble]:
    meant = any(gpu.driver != "vfio-pci" for gpu in driver.pci)
    if not driver.fault or driver.mismatch:
        return
    if meant or driver.module:
        yield Trouble(driver.fault)
    elif not driver.pci:
        yield Trouble(
            f"{driver.fault}; the PCI bus has no NVIDIA GPU",
            severity=NOTE,
            remedy="nothing, if this node should have no GPU",
        )


@check("D002")
def _mismatch(driver: Driver) -> Iterator[str]:
    if driver.mismatch:
        yield f"the kernel module is {driver.module}; {driver.fault}"


@check("D003")
def _several(driver: Driver) -> Iterator[str]:
    others = [i for i in driver.installed if (i.version, i.root) != (driver.version, driver.root)]
    if driver.version and others:
        names = listed(f"{i.version} below {i.root}" for i in others)
        yield f"{driver.version} below {driver.root} is used; also installed: {names}"


@check("D004")
def _no_gpu(driver: Driver) -> Iterator[str | Trouble]:
    yield from map(": ".join, driver.lost)
    bound = [gpu for gpu in driver.pci if gpu.driver not in {"vfio-pci", "nouveau"}]
    if driver.gpus or driver.platform_faults:
        return
    if bound and driver.module:
        buses = listed(g.bus_id for g in bound)
        yield f"{len(bound)} on the PCI bus ({buses}), but the driver shows none"
    elif not driver.pci and driver.version and driver.module:
        yield Trouble(
            "the driver is loaded, but the PCI bus has no NVIDIA GPU",
            severity=NOTE,
            remedy="nothing, if this node should have no GPU",
        )


@check("D005")
def _nvml(nvml: Nvml) -> Iterator[Trouble]:
    if nvml.failure:
        yield Trouble(nvml.failure)
    for lost in nvml.lost:
        yield Trouble(lost, remedy="reset the GPU, or reboot the node", command=_RESET)
    if nvml.notes:
        yield Trouble(listed(nvml.notes), severity=WARNING)
    if not nvml.failure and nvml.seconds > min(_SLOW, nvml.limit / 2):
        yield Trouble(
            f"it answered after {nvml.seconds:g} s; the limit is {nvml.limit:g} s",
            severity=WARNING,
            remedy="keep the driver initialised, or raise nvml-timeout in [node] of config.toml",
        )


@check("D016")
def _conflicts(nvml: Nvml) -> Iterable[str]:
    return nvml.conflicts


@check("D006")
def _persistence(nvml: Nvml) -> Iterable[str]:
    is_off = nvml.persistence == "off"
    return ["nvidia-persistenced is not running, and persistence mode is off"] if is_off else ()


@check("D007")
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
    who = (
        "loaded when a container needs them" if policy.load_modules else "not loaded automatically"
    )
    yield Trouble(
        f"{names} ({who})",
        severity=severity,
        remedy="load them at boot: name them in a file of /etc/modules-load.d",
        command=f"modprobe --all {names}",
    )


@check("D008")
def _nodes_missing(driver: Driver, policy: Policy) -> Iterator[Trouble]:
    missing = [path for path in driver.missing_nodes if path.startswith("/dev/nvidia")]
    if not missing or not driver.gpus:
        return
    created = policy.make_nodes and driver.may_make_nodes
    when = "when a container needs them" if created else "automatically"
    yield Trouble(
        f"{listed(missing)} ({'' if created else 'not '}created {when})",
        severity=WARNING if created else ERROR,
    )


@check("D009")
def _nodes_wrong(driver: Driver) -> Iterable[str]:
    return map(": ".join, driver.wrong_nodes)


@check("D010")
def _char_links(driver: Driver, machine: Machine, policy: Policy) -> Iterator[Trouble]:
    if driver.char_links and machine.systemd:
        created = " (created when a container gets the device)" if policy.char_links else ""
        yield Trouble(
            f"missing or wrong: /dev/char/{listed(driver.char_links)}{created}",
            severity=NOTE if policy.char_links else WARNING,
            command="nvshim devices create",
            remedy="create the links at boot, also for containers of other runtimes",
        )


@check("D011")
def _nouveau(driver: Driver) -> Iterator[str | Trouble]:
    bound = [gpu.bus_id for gpu in driver.pci if gpu.driver in {"nouveau", "nova_core"}]
    if bound:
        yield f"{listed(bound)}: bound to the kernel's own driver"
    elif "nouveau" in driver.modules and driver.pci:
        yield Trouble("the module is loaded, but has no GPU yet", severity=WARNING)


@check("D012")
def _vfio(driver: Driver) -> Iterable[str]:
    bound = [gpu.bus_id for gpu in driver.pci if gpu.driver == "vfio-pci"]
    return [f"{listed(bound)}: bound to vfio-pci"] if bound else ()


@check("D013")
def _mps(driver: Driver) -> Iterator[str]:
    if driver.mps_pipe and not driver.mps_runs:
        yield f"{driver.mps_pipe}/control exists, but nvidia-cuda-mps-control is not running"


@check("D014")
def _imex(driver: Driver) -> Iterator[str]:
    if driver.imex and not driver.imex_channels:
        yield "the driver supports IMEX channels, but no channel's device node exists"


@check("D015")
def _platform(driver: Driver) -> Iterable[str]:
    return driver.platform_faults


@check("D017")
def _drained(driver: Driver) -> Iterator[Trouble]:
    for device, why, reset in driver.drained:
        command = "nvshim undrain " + ("--driver" if device == DRIVER else device)
        line = f"{device} is out of service {why}"
        if reset:
            of_mig = reset.startswith(OF_MIG)
            what, words = ("mig apply", "FILE") if of_mig else ("reset", device)
            yield Trouble(
                f"{line}; its {'change' if of_mig else 'reset'} stopped at: {reset}",
                remedy=f"wait for the running `nvshim {what}`, or run it again",
                command=f"nvshim {what} {words}",
            )
        else:
            yield Trouble(line, command=command)


@check("D018")
def _manifests(driver: Driver) -> Iterator[Trouble]:
    for path, _, why in driver.manifests:
        if why:
            yield Trouble(
                f"{path}: {why}",
                severity=WARNING,
                remedy="install the driver's package again; containers get the file as it is",
            )
    changed = [f"{path} ({', '.join(paths)})" for path, paths, why in driver.manifests if not why]
    if changed:
        yield Trouble(f"containers get changed copies of {listed(changed)}")


@check("D019")
def _others(driver: Driver) -> Iterator[str]:
    if driver.others:
        yield listed(driver.others)
