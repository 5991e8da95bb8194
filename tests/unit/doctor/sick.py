"""Broken nodes: how each is broken, and the finding that the doctor reports."""

from __future__ import annotations

import json
import shutil
from typing import Final

from integration.doctor.findings import Severity
from tests.unit.doctor.breaks import (
    ELSEWHERE_ONLY,
    NVIDIAS,
    OPTIONS,
    PROGRAM,
    RUNTIMES,
    Break,
    added,
    all_of,
    another_gpu,
    another_version,
    changed,
    container_of,
    enable_cdi,
    future_library,
    gpu_driver,
    gpu_off_the_bus,
    handler_in,
    in_k0s,
    in_k3s,
    in_version_1,
    large,
    module_of_another_version,
    no_handler,
    of_runcs_type,
    older_version,
    other_driver_container,
    other_numbers,
    pod_of_verify,
    real,
    removed_version,
    said_by,
    sandboxer_of,
    spec_with,
    text,
    unpackaged,
    uvm_elsewhere,
    without,
    without_containerd,
)
from tests.unit.doctor.trees import (
    BUNDLE,
    CDI,
    CHECKPOINT,
    CONTAINERD,
    CONTAINERD_PID,
    DAEMON,
    DEVICE_ALLOW,
    DROP_IN,
    KUBELET,
    MOUNTS,
    OURS,
    PREFIX,
    SERVER_PID,
    SHIM_PID,
    TREE,
)

ICD: Final = '{{"ICD": {{"library_path": "{}"}}}}'
OF_VULKAN: Final = "/driver/usr/share/vulkan/icd.d"

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

# How to break a node, and the expected finding: code, severity, and a word of its text.
SICK: Final[dict[str, tuple[Break, str, Severity, str]]] = {
    "no driver": (without("/driver/usr"), "D001", ERROR, "no libcuda"),
    "module of another version": (
        module_of_another_version,
        "D002", ERROR, "550.54.14",
    ),
    "a device out of service": (
        text("/var/lib/containerd-shim-nvidia/drained/GPU-7", '{"reason": "fan", "since": 1}'),
        "D017", WARNING, "since 1970-01-01T00:00:01Z: fan",
    ),
    "a reset that was interrupted": (
        text("/var/lib/containerd-shim-nvidia/drained/GPU-7", '{"reset": "nvidia-smi resets it"}'),
        "D017", WARNING, "its reset stopped at: nvidia-smi resets it",
    ),
    "a manifest with a path of the host": (
        text(f"{OF_VULKAN}/nvidia_icd.json", ICD.format("/usr/lib64/libGLX_nvidia.so.0")),
        "D018", NOTE, "nvidia_icd.json (/usr/lib64/libGLX_nvidia.so.0)",
    ),
    "a manifest of another driver": (
        text(f"{OF_VULKAN}/nvidia_icd.json", ICD.format("/x/libother.so.0")),
        "D018", WARNING, "it names /x/libother.so.0, which this driver does not have",
    ),
    "a manifest that no loader understands": (
        text(f"{OF_VULKAN}/nvidia_icd.json", "{"),
        "D018", WARNING, "/driver/usr/share/vulkan/icd.d/nvidia_icd.json: it is not valid JSON",
    ),
    "a library of no known capability": (future_library, "D019", NOTE, "libnvfuture.so."),
    "a MIG layout that was interrupted": (
        text("/var/lib/containerd-shim-nvidia/drained/GPU-7", '{"reset": "MIG layout: changed"}'),
        "D017", WARNING, "its change stopped at: MIG layout: changed",
    ),
    "a second driver in a container": (other_driver_container, "D003", NOTE, "550.54.14"),
    "no GPU in procfs": (without("/proc/driver/nvidia/gpus"), "D004", ERROR, "2 on the PCI bus"),
    "a GPU off the bus": (gpu_off_the_bus, "D004", ERROR, "fell off the bus"),
    "uvm not loaded": (without("/sys/module/nvidia_uvm"), "D007", NOTE, "nvidia-uvm"),
    "uvm not loaded, and not to be": (
        all_of(
            without("/sys/module/nvidia_uvm"),
            added(OURS, "[devices]\nload-kernel-modules = false\n"),
        ),
        "D007", ERROR, "not loaded automatically",
    ),
    "control node missing": (without("/dev/nvidiactl"), "D008", WARNING, "/dev/nvidiactl"),
    "control node missing, and not to be made": (
        all_of(without("/dev/nvidia-uvm"), added(OURS, "[devices]\nmake-nodes = false\n")),
        "D008", ERROR, "not created automatically",
    ),
    "GPU's node missing": (without("/dev/nvidia1"), "D008", WARNING, "/dev/nvidia1"),
    "uvm with other numbers": (uvm_elsewhere, "D009", ERROR, "/dev/nvidia-uvm"),
    "no file but a node": (
        all_of(without("/dev/nvidia0"), text("/dev/nvidia0", "")), "D009", ERROR, "no character",
    ),
    "link missing": (without("/dev/char/195:0"), "D010", NOTE, "195:0"),
    "link of another device": (
        all_of(
            lambda tree: tree.link("/dev/char/195:0", "../nvidia1"),
            lambda tree: tree.write(OURS, tree.read(OURS).replace(
                "[policy]", "char-links = false\n[policy]")),
        ),
        "D010", WARNING, "195:0",
    ),
    "nouveau has a GPU": (gpu_driver("nouveau"), "D011", ERROR, "0000:"),
    "nouveau is loaded": (text("/sys/module/nouveau/initstate", "live"), "D011", WARNING, "loaded"),
    "vfio has a GPU": (gpu_driver("vfio-pci"), "D012", NOTE, "0000:"),
    "MPS without a daemon": (text("/tmp/nvidia-mps/control", ""), "D013", WARNING, "nvidia-mps"),
    "IMEX without a channel": (
        lambda tree: tree.write("/proc/devices", tree.read("/proc/devices").replace(
            "Character devices:\n", "Character devices:\n242 nvidia-caps-imex-channels\n")),
        "D014", NOTE, "IMEX",
    ),
    "WSL without its libraries": (
        all_of(
            lambda tree: tree.write(OURS, tree.read(OURS).replace(
                "[policy]", 'platform = "wsl"\n[policy]')),
        ),
        "D015", ERROR, "dxg",
    ),
    "Tegra without its lists": (
        lambda tree: tree.write(OURS, tree.read(OURS).replace(
            "[policy]", 'platform = "tegra"\n[policy]')),
        "D015", ERROR, "csv",
    ),
    "runc of Debian 12": (real("/usr/sbin/runc", "/usr/bin/runc"), "D020", ERROR, "CVE-2025-31133"),
    "crun of Debian 12": (
        said_by("/usr/bin/crun"), "D021", WARNING, "CVE-2026-47766",
    ),
    "containerd of Debian 12": (
        real("/usr/bin/containerd", "/usr/bin/containerd"), "D022", ERROR, "CVE-2026-53488",
    ),
    "NVIDIA's toolkit": (
        unpackaged("nvidia-ctk", "NVIDIA Container Toolkit CLI version 1.17.3"),
        "D023", ERROR, "CVE-2025-23266",
    ),
    "a runc that is none": (unpackaged("runc", "hello"), "D024", WARNING, "no version"),
    "a runc that fails": (
        lambda tree: tree.script("/usr/bin/runc", "echo wrong libc >&2; exit 3"),
        "D024", WARNING, "wrong libc",
    ),
    "a runc of long ago": (unpackaged("runc", "runc version 1.0.3"), "D025", ERROR, "1.1.0"),
    "no TOML": (text(CONTAINERD, "version = = 2"), "D030", ERROR, "TOML"),
    "what containerd refuses": (
        added(CONTAINERD, "[grpc]\naddress = 5\n"), "D030", ERROR, "exited",
    ),
    "no handler, and no program": (
        all_of(no_handler, without(DAEMON), without(PROGRAM)),
        "D031", ERROR, "io.containerd.nvidia.v1",
    ),
    "no handler, and a kubelet": (
        all_of(no_handler, without(DAEMON)), "D031", WARNING, f"can run {PROGRAM} by name",
    ),
    "no handler, and no kubelet": (
        all_of(no_handler, without(DAEMON), without(KUBELET, "/proc/820")),
        "D031", NOTE, f"can run {PROGRAM} by name",
    ),
    "nobody imports it": (
        handler_in(DROP_IN, "# imports"), "D032", ERROR, "does not import",
    ),
    "in the wrong directory": (
        handler_in("/etc/containerd/config.d/99-nvidia.toml"),
        "D032", ERROR, "config.d",
    ),
    "drop-in of another version": (
        changed(DROP_IN, "version = 2", "version = 3"), "D033", WARNING, "version 3",
    ),
    "default that is not there": (
        added(CONTAINERD, '[plugins."io.containerd.grpc.v1.cri".containerd]\n'
              'default_runtime_name = "gone"\n'),
        "D034", ERROR, "gone",
    ),
    "a handler without a type": (added(CONTAINERD, f"{RUNTIMES}.kata]\n"), "D035", ERROR, "kata"),
    "a handler that is NVIDIA's": (
        added(CONTAINERD, f'{RUNTIMES}.legacy]\nruntime_type = "io.containerd.runc.v2"\n'
              f'{RUNTIMES}.legacy.options]\nBinaryName = "{NVIDIAS}"\n'),
        "D036", WARNING, "legacy",
    ),
    "a shim that is not there": (
        without(PROGRAM), "D037", ERROR, "nvidia",
    ),
    "a shim that is not on containerd's path": (
        text(f"/proc/{CONTAINERD_PID}/environ", "PATH=/sbin:/bin\0"), "D037", ERROR, "/sbin:/bin",
    ),
    "a runtime that is not there": (
        changed(CONTAINERD, "/usr/bin/runc", "/usr/bin/youki"), "D037", ERROR, "youki",
    ),
    "configured after the start": (
        lambda tree: tree.began(CONTAINERD_PID, -3600), "D038", WARNING, CONTAINERD,
    ),
    "k3s overwrites it": (in_k3s, "D039", WARNING, "k3s"),
    "k0s overwrites it": (in_k0s, "D039", WARNING, "k0s"),
    "a drop-in that takes a section away": (
        text(DROP_IN, f'version = 2\n{RUNTIMES}.kata]\nruntime_type = "io.containerd.kata.v2"\n'),
        "D045", ERROR, "runc",
    ),
    "no CRI for the kubelet": (
        changed(CONTAINERD, "imports", 'disabled_plugins = ["cri"]\nimports'),
        "D046", ERROR, "kubelet",
    ),
    "no CRI for the handler": (
        all_of(
            without(KUBELET),
            changed(CONTAINERD, "imports", 'disabled_plugins = ["cri"]\nimports'),
        ),
        "D046", WARNING, "no effect",
    ),
    "a misspelt option": (
        changed(CONTAINERD, "SystemdCgroup", "SystemdCgroups"), "D040", ERROR, "SystemdCgroups",
    ),
    "an option that containerd drops": (
        of_runcs_type(options=f'{OPTIONS}CriuPath = "/opt/criu"\n'), "D040", WARNING, "CriuPath",
    ),
    "a containerd that does not ask": (
        changed("/usr/bin/containerd", "v2.3.5", "v2.2.6"), "D047", NOTE, "does not ask nvidia",
    ),
    "a sandboxer that is runc's": (
        # Debian 12's containerd has no sandboxers.
        all_of(of_runcs_type('\nsandboxer = "shim"'), without_containerd),
        "D048", ERROR, "sandboxer",
    ),
    "a containerd that ends by a sandboxer": (sandboxer_of("v2.2.7"), "D049", ERROR, "2.2.7"),
    "a candidate of the first that does not": (
        sandboxer_of("v2.3.0-rc.1"), "D049", ERROR, "2.3.0-rc.1",
    ),
    "a sandboxer, and who knows which containerd": (
        sandboxer_of("main"), "D049", WARNING, "unknown version",
    ),
    "kubelet has cgroupfs": (
        changed(KUBELET, "systemd", "cgroupfs"), "D041", ERROR, "SystemdCgroup = true",
    ),
    "our handler has cgroupfs": (
        of_runcs_type(options=""), "D041", WARNING, "nvidia",
    ),
    "no systemd": (without("/run/systemd/system"), "D041", ERROR, "does not run"),
    "handlers differ": (
        all_of(without(KUBELET), changed(CONTAINERD, OPTIONS, "SystemdCgroup = false\n")),
        "D042", WARNING, "runc",
    ),
    "a class without a handler": (
        changed("/classes.yaml", "handler: nvidia", "handler: nvidia-cdi"),
        "D043", ERROR, "nvidia-cdi",
    ),
    "a handler without a class": (
        changed("/classes.yaml", "handler: nvidia", "handler: runc"), "D044", WARNING, "nvidia",
    ),
    "daemon.json is none": (text(DAEMON, "{"), "D050", ERROR, "not valid JSON"),
    "crio.conf is none": (text("/etc/crio/crio.conf.d/10.conf", "[[["), "D050", ERROR, "10.conf"),
    "Docker's runtime is NVIDIA's": (
        text(DAEMON, json.dumps({"runtimes": {"nvidia": {"path": NVIDIAS}}})),
        "D051", WARNING, NVIDIAS,
    ),
    "Docker's default is not there": (
        text(DAEMON, json.dumps({"default-runtime": "nvidia"})), "D051", ERROR, "default-runtime",
    ),
    "no hook for --gpus": (
        without("/usr/bin/nvidia-container-runtime-hook"), "D052", WARNING, "hook",
    ),
    "ours calls NVIDIA's": (
        changed(CONTAINERD, "/usr/bin/runc", NVIDIAS), "D053", ERROR, "the shim's handler",
    ),
    "the default is NVIDIA's": (
        changed(
            CONTAINERD,
            ".options]\nSystemdCgroup",
            f'.options]\nBinaryName = "{NVIDIAS}"\nSystemdCgroup',
        ),
        "D053", WARNING, "default",
    ),
    "an OCI hook": (
        text("/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", '{"hook": "NVIDIA"}'),
        "D054", WARNING, "hooks.d",
    ),
    "an NRI plugin": (
        lambda tree: tree.process(77, "/work/nvidia-toolkit", "--enable-nri-plugin"),
        "D054", WARNING, "NRI",
    ),
    "CDI of other directories": (
        all_of(enable_cdi, added(OURS, '[cdi]\nspec-dirs = ["/var/run/cdi"]\n')),
        "D055", NOTE, "/etc/cdi",
    ),
    "CDI of one directory more": (
        all_of(enable_cdi, added(OURS, '[cdi]\nspec-dirs = ["/etc/cdi", "/var/run/cdi", "/x"]\n')),
        "D055", NOTE, "/x",
    ),
    "CRI-O calls NVIDIA's": (
        text("/etc/crio/crio.conf.d/99.conf",
             f'[crio.runtime.runtimes.nvidia]\nruntime_path = "{NVIDIAS}"\n'),
        "D056", NOTE, "nvidia",
    ),
    "a spec that is none": (text(CDI, '{"cdiVersion": "0.5.0"}'), "D060", ERROR, "kind"),
    "a spec for all to write": (
        lambda tree: tree.write(CDI, tree.read(CDI), 0o666), "D060", ERROR, "everybody",
    ),
    "a spec's files are gone": (
        lambda tree: shutil.rmtree(tree.at("/driver/usr/bin")), "D061", ERROR, "/driver/usr/bin",
    ),
    "a spec's nodes are others": (spec_with(other_numbers), "D062", ERROR, "not 195:200"),
    "a spec of another driver": (spec_with(another_version), "D063", ERROR, "550.54.14"),
    "two specs in one directory": (
        spec_with(lambda spec: None, "/run/cdi/other.json"), "D064", ERROR, "cannot be used",
    ),
    "two specs in two directories": (
        spec_with(lambda spec: None, "/etc/cdi/other.json"), "D064", WARNING, "the last file",
    ),
    "no spec after a boot": (all_of(enable_cdi, without(CDI)), "D065", WARNING, "containerd"),
    "a spec with a GPU that is gone": (spec_with(another_gpu), "D066", WARNING, "GPU-00000000"),
    "a misspelt key": (changed(OURS, "mode", "mood"), "D070", ERROR, "mood"),
    "every image is believed": (changed(OURS, '"default"', '"nvidia"'), "D071", WARNING, "nvidia"),
    "NVIDIA's configuration": (
        all_of(without(OURS), text("/etc/nvidia-container-runtime/config.toml", "")),
        "D071", WARNING, "nvidia-container-runtime",
    ),
    "what NVIDIA's configuration says": (
        all_of(
            without(OURS),
            text("/etc/nvidia-container-runtime/config.toml",
                 '[nvidia-container-cli]\nldcache = "/x"\n'),
        ),
        "D072", NOTE, "ldcache",
    ),
    "a key that a later release of NVIDIA's has": (
        all_of(
            without(OURS),
            text("/etc/nvidia-container-runtime/config.toml", "new-in-1-21 = true\n"),
        ),
        "D072", NOTE, "new-in-1-21",
    ),
    "a hook for all to write": (
        all_of(
            text("/usr/bin/hook", "", 0o777),
            added(OURS, '[cdi]\nallow-hooks = ["/usr/bin/hook"]\n'),
        ),
        "D073", ERROR, "users other than root",
    ),
    "SELinux enforces": (text("/sys/fs/selinux/enforce", "1"), "D080", WARNING, "missing"),
    "SELinux's boolean is off": (
        all_of(
            text("/sys/fs/selinux/enforce", "1"),
            text("/sys/fs/selinux/booleans/container_use_devices", "0 0"),
        ),
        "D080", WARNING, "off",
    ),
    "AppArmor without a parser": (
        all_of(
            text("/sys/module/apparmor/parameters/enabled", "Y\n"),
            without("/usr/bin/apparmor_parser"),
        ),
        "D081", WARNING, "apparmor_parser",
    ),
    "hybrid": (
        added(MOUNTS, "40 30 0:30 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n"),
        "D082", NOTE, "version 1",
    ),
    "no cgroups": (changed(MOUNTS, "cgroup2", "tmpfs"), "D082", ERROR, "no cgroups"),
    "nodev on /dev": (changed(MOUNTS, "/dev rw", "/dev rw,nodev"), "D084", ERROR, "nodev"),
    "noexec on the driver": (
        added(MOUNTS, "50 22 8:2 / /driver rw,noexec - ext4 /dev/sdb rw\n"),
        "D084", ERROR, "driver",
    ),
    "noexec on images": (
        added(MOUNTS, "50 22 8:2 / /var/lib/containerd rw,noexec - ext4 /dev/sdb rw\n"),
        "D084", WARNING, "snapshotter",
    ),
    "few inotify instances": (
        text("/proc/sys/fs/inotify/max_user_instances", "8\n"), "D085", WARNING, "8",
    ),
    "copies of the driver": (
        large("/var/lib/containerd-shim-nvidia/layers/.files/copy"), "D089", NOTE, "copies",
    ),
    "files of a driver that is gone": (
        large(f"/var/lib/containerd-shim-nvidia/layers/01234567-{64 * '0'}/fs/usr/lib/x.so"),
        "D089", NOTE, "removed",
    ),
    "few descriptors": (
        changed(f"/proc/{CONTAINERD_PID}/limits", "1048576", "1024"), "D087", WARNING, "1024",
    ),
    "current leads nowhere": (
        lambda tree: tree.link(f"{PREFIX}/current", "gone"), "D090", ERROR, "current",
    ),
    "a link of ours leads to what only another machine has": (
        lambda tree: tree.link("/usr/local/bin/nvshim", ELSEWHERE_ONLY), "D090", ERROR, "nvshim",
    ),
    "a link of ours leads to itself": (
        lambda tree: tree.link("/usr/local/bin/nvshim", "/usr/local/bin/nvshim"),
        "D090", ERROR, "nvshim",
    ),
    "no interpreter": (without("/usr/bin/python3"), "D091", ERROR, "python3"),
    "two programs": (
        lambda tree: tree.script("/usr/bin/containerd-shim-nvidia-v1"), "D092", WARNING, "/usr/bin",
    ),
    "shims of an older version": (older_version, "D093", NOTE, "0.0.9"),
    "a version that is not in use": (
        lambda tree: shutil.copytree(tree.at(TREE), tree.at(f"{PREFIX}/0.0.1-cc")),
        "D093", NOTE, "0.0.1-cc",
    ),
    "shims of a version that is gone": (removed_version, "D094", ERROR, "0.0.9"),
    "a fat shim": (
        changed(f"/proc/{SHIM_PID}/smaps_rollup", "3000", "99000"), "D095", WARNING, "96 MiB",
    ),
    "a fork server that is deaf": (
        without(f"/proc/{SERVER_PID}/fd/4"), "D096", WARNING, "accepts no connections",
    ),
    "a fork server that is stopped": (
        lambda tree: tree.began(SERVER_PID, -3600, "T"),
        "D096", WARNING, "accepts no connections",
    ),
    "a fork server of another version": (
        lambda tree: tree.change(f"/proc/{SERVER_PID}/maps", "0.1.0-aaaaaaaa", "0.0.9-bbbbbbbb"),
        "D096", WARNING, "0.0.9",
    ),
    "systemd does not know the GPU": (
        changed(DEVICE_ALLOW, "DeviceAllow=/dev/char/195:0 rwm\n", ""),
        "D100", ERROR, "/dev/nvidia0",
    ),
    "systemd lets it be made, not used": (
        changed(DEVICE_ALLOW, "195:0 rwm", "195:0 m"), "D100", ERROR, "/dev/nvidia0",
    ),
    "the cgroup does not allow it": (
        in_version_1("c 1:3 rwm\nc 195:255 rw\n"), "D100", ERROR, "its cgroup",
    ),
    "made with another driver": (
        module_of_another_version, "D101", ERROR, "550.54.14",
    ),
    "its device is another": (
        lambda tree: tree.node("/dev/nvidia0", 195, 7), "D101", ERROR, "/dev/nvidia0",
    ),
    "its GPU is gone": (
        changed(f"{BUNDLE}/nvidia.json", "GPU-", "GPU-0"), "D102", ERROR, "k8s.io/web",
    ),
    "its record is damaged": (text(f"{BUNDLE}/nvidia.json", "[]"), "D103", NOTE, "could not look"),
    "no driver capabilities are named": (
        container_of("example.com/vision:1"), "D113", NOTE, "(image example.com/vision:1)",
    ),
    "driver capabilities are named by nothing": (
        container_of(NVIDIA_DRIVER_CAPABILITIES=""), "D113", NOTE, "1 of 1 ",
    ),
    "a killed verification": (pod_of_verify, "D114", WARNING, "gpu/nvshim-verify-0123abcd"),
    "systemd does not answer": (
        lambda tree: tree.script("/usr/bin/systemctl", "echo no bus >&2; exit 1"),
        "D103", NOTE, "no bus",
    ),
    "the agent's unit is enabled, and nothing runs": (
        lambda tree: tree.link(
            "/etc/systemd/system/multi-user.target.wants/nvshim-node.service", "/x"
        ),
        "D104", ERROR, "the unit nvshim-node is enabled",
    ),
    "the agent has a pod, and nothing runs": (
        text("/var/log/pods/x_node-agent-ab1_77/node-agent/0.log", ""),
        "D104", ERROR, "/var/log/pods/x_node-agent-ab1_77/node-agent",
    ),
    "no device plugin ever": (without(CHECKPOINT), "D106", ERROR, "no node agent runs"),
    "no device plugin since the kubelet's restart": (
        changed(CHECKPOINT, '["GPU-a", "GPU-b"]', "null"), "D106", ERROR, "its plugin is gone",
    ),
}  # fmt: skip

# Findings that files cannot cause: they need a fault of NVML or of the kernel that runs the tests,
# or a running agent (test_doctor_agent.py).
ELSEWHERE: Final = {
    "D005",
    "D006",
    "D016",
    "D083",
    "D105",
    "D107",
    "D108",
    "D109",
    "D110",
    "D111",
    "D112",
}
