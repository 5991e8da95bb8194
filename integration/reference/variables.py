"""Every environment variable that means something here, by who has to set it.

No code says what a variable is for, so this is a table; that it is complete, and has no
variable that nothing reads, is a test's to say.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from integration.kubernetes.environment import VARIABLES
from integration.kubernetes.settings import Settings
from integration.node.plugin.flags import FLAGS
from integration.reference.markdown import code, table

__all__ = ["ELSEWHERE", "GROUPS", "Group", "Variable", "declared", "page"]


class Variable(NamedTuple):
    """A variable.

    Attributes:
        name: its name; one that ends in ``*`` stands for all that begin so.
        meaning: what it does, as Markdown.
        default: what holds if it is not set.
    """

    name: str
    meaning: str
    default: str = ""


class Group(NamedTuple):
    """Variables that are set at one place.

    Attributes:
        title: of the section.
        head: what holds for all of them.
        variables: in the order of the page.
    """

    title: str
    head: str
    variables: tuple[Variable, ...]


_FEATURE: Final = "`enabled` gives {}; see [beside GPUs](../architecture.md#beside-gpus)"
_ACCESS: Final = "`all` gives the capability node of {}; in a pod for privileged containers"


def _of_installer() -> tuple[Variable, ...]:
    """The table that the installer itself reads; what means nothing there comes last."""
    plain = Settings()
    rows = []
    for name, known in sorted(VARIABLES.items(), key=lambda row: not row[1].field):
        if not known.field:
            rows.append(Variable(name, f"NVIDIA's, and nothing here: {known.meaning}"))
            continue
        value = getattr(plain, known.field)
        if name.startswith("NO_"):  # what it denies is the field's default
            value = False
        text = str(value).lower() if isinstance(value, bool) else f"{value}"
        rows.append(Variable(name, known.meaning, code(text) if text else ""))
    return tuple(rows)


def _of_device_plugin() -> tuple[Variable, ...]:
    """The flags that stand for keys of the configuration; what means nothing here comes last."""
    rows = []
    for flag in sorted(FLAGS, key=lambda flag: flag.ignored):
        for name in flag.variables:
            meaning = f"`--{flag.name}`, in the configuration `{flag.path}`"
            if flag.ignored:
                meaning = f"NVIDIA's, and nothing here: {flag.meaning}"
            rows.append(Variable(name, meaning))
    return tuple(rows)


GROUPS: Final = (
    Group(
        "In a container: what it asks for",
        "Set by a pod, by `docker run --env`, or by the image. Who may ask by them is decided by "
        "[policy](../architecture.md#policy).",
        (
            Variable(
                "NVIDIA_VISIBLE_DEVICES",
                "the GPUs: `all`, `none`, `void`, or a comma list of indices, ranges (`0-3`), "
                "UUIDs or their beginnings, MIG devices (`0:1`, `MIG-…`), PCI addresses, "
                "CDI names; see [requests](../architecture.md#requests)",
                "nothing; `all` for an image with `CUDA_VERSION` and without `NVIDIA_REQUIRE_CUDA`",
            ),
            Variable(
                "NVIDIA_DRIVER_CAPABILITIES",
                "a comma list of [driver capabilities](capabilities.md), or `all`",
                "`compute,utility`; `all` for such an image",
            ),
            Variable(
                "NVIDIA_REQUIRE_*",
                "what driver and GPUs have to be, or the container is not started: `cuda>=12.4 "
                "brand=tesla,driver>=535`. A space means or, a comma and; several variables all "
                "have to be met",
            ),
            Variable(
                "NVIDIA_REQUIRE_JETPACK",
                "on Tegra, `csv-mounts=all` gives what every list of files says, and not those of "
                "devices, drivers and l4t alone",
            ),
            Variable("NVIDIA_DISABLE_REQUIRE", "`true` leaves `NVIDIA_REQUIRE_*` unchecked"),
            Variable("NVIDIA_GDS", _FEATURE.format("GPUDirect Storage's nodes")),
            Variable("NVIDIA_MOFED", _FEATURE.format("InfiniBand's nodes")),
            Variable("NVIDIA_GDRCOPY", _FEATURE.format("GDRCopy's node")),
            Variable(
                "NVIDIA_NVSWITCH",
                _FEATURE.format("the switches' nodes") + "; in a pod for privileged containers",
            ),
            Variable("NVIDIA_IMEX_CHANNELS", "a comma list of channels (`0,1`), or `all`"),
            Variable("NVIDIA_MIG_CONFIG_DEVICES", _ACCESS.format("mig/config")),
            Variable("NVIDIA_MIG_MONITOR_DEVICES", _ACCESS.format("mig/monitor")),
            Variable(
                "CUDA_VERSION",
                "images of the time before `NVIDIA_VISIBLE_DEVICES` ask by it for all GPUs, and "
                "require that version",
            ),
            Variable(
                "AMD_VISIBLE_DEVICES",
                "AMD's GPUs; see [AMD and Intel](../architecture.md#amd-and-intel)",
            ),
            Variable("INTEL_VISIBLE_DEVICES", "Intel's GPUs, in the same forms"),
        ),
    ),
    Group(
        "In a container: what it is given",
        "Set by the injection, for its init and for each exec.",
        (
            Variable(
                "NVIDIA_CTK_LIBCUDA_DIR",
                "the directory of libcuda, as NVIDIA's runtime sets it",
            ),
            Variable(
                "NVIDIA_VISIBLE_DEVICES",
                "`void`, by the edits of `nvshim cdi generate`: whoever meets it later has nothing "
                "left to do",
            ),
        ),
    ),
    Group(
        "In containerd's environment",
        "containerd hands its environment to the shims that it starts: in a drop-in of its unit, "
        "`Environment=NVSHIM_CONFIG=…`. A shim that runs keeps what it was started with.",
        (
            Variable(
                "NVSHIM_CONFIG",
                "the [configuration](configuration.md) to read; it has to be there",
                "`/etc/containerd-shim-nvidia/config.toml`",
            ),
            Variable(
                "NVIDIA_CTK_CONFIG_FILE_PATH",
                "NVIDIA's configuration, which is read where ours is not there",
                "`/etc/nvidia-container-runtime/config.toml`",
            ),
            Variable(
                "NVSHIM_FORK_SERVER", "`0`: no shim is forked from a warm process", "there is one"
            ),
            Variable(
                "NVSHIM_STAND_INS",
                "`0`: every call of runc and crun is made, also those whose effect is known",
                "start, kill and delete are done without the program where that is safe",
            ),
            Variable("PATH", "where runc, crun, criu and iptables are found", "the usual six"),
            Variable("XDG_RUNTIME_DIR", "rootless containerd: where sockets are"),
            Variable(
                "DBUS_SESSION_BUS_ADDRESS", "handed on to runc, for rootless cgroups of systemd"
            ),
            Variable("TTRPC_ADDRESS", "set by containerd: where events are sent to"),
            Variable("SCHED_CORE", "set by containerd: shims get a core-scheduling cookie"),
        ),
    ),
    Group(
        "In the environment of nvshim",
        "",
        (
            Variable("NVSHIM_CONFIG", "the configuration, if `--config` names none"),
            Variable("NVIDIA_CTK_CONFIG_FILE_PATH", "as above"),
            Variable(
                "NVSHIM_CONTAINERD_STATE",
                "where containerd keeps its state, if `--containerd-state` names nothing; several "
                "directories with colons between them",
                "where packages, Docker, k3s, k0s and MicroK8s have it",
            ),
            Variable("NO_COLOR", "set to anything: no colours on a terminal either"),
            Variable("TERM", "`dumb`: no colours, and tables as for a pipe"),
            Variable(
                "_NVSHIM_COMPLETE",
                "set by a shell's completion (`nvshim completion`), to ask what may follow",
            ),
        ),
    ),
    Group(
        "In the environment of nvshim node",
        "Those of NVIDIA's device plugin, each in place of a flag; one that is empty is not set. "
        "Lists are comma lists.",
        (
            *_of_device_plugin(),
            Variable("KUBELET_SOCKET", "`--kubelet-socket`"),
            Variable("CONFIG_FILE", "`--config-file`"),
            Variable("CONFIG_FILE_SRCDIR", "`--config-dir`"),
            Variable("NODE_LABEL", "`--node-label`"),
            Variable("DEFAULT_CONFIG", "`--default-config`"),
            Variable("FALLBACK_STRATEGIES", "`--fallback-strategies`"),
            Variable("DP_DISABLE_HEALTHCHECKS", "`--disable-healthchecks`"),
            Variable("DP_ENABLE_HEALTHCHECKS", "`--enable-healthchecks`"),
            Variable("KUBERNETES_SERVICE_HOST", "`--api-server`"),
            Variable("KUBERNETES_SERVICE_PORT", "`--api-port`"),
        ),
    ),
    Group(
        "In the environment of nvshim compat nvidia-ctk",
        "Those of the original, each in place of a flag; lists are comma lists.",
        (
            Variable("NVIDIA_CTK_DEBUG", "`--debug`"),
            Variable("NVIDIA_CTK_QUIET", "`--quiet`"),
            Variable("NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", "`cdi generate --output`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT", "`--format`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_MODE", "`--mode`"),
            Variable("NVIDIA_CTK_DRIVER_ROOT", "`--driver-root`"),
            Variable("NVIDIA_CTK_DEV_ROOT", "`--dev-root`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES", "`--device-name-strategy`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_VENDOR", "`--vendor`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_CLASS", "`--class`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE", "`--no-all-device`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS", "`--device-id`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS", "`--feature-flag`"),
            Variable("NVIDIA_CTK_CDI_GENERATE_CONFIG_SEARCH_PATHS", "changes nothing; it is said"),
            Variable("NVIDIA_CTK_CDI_GENERATE_LIBRARY_SEARCH_PATHS", "changes nothing; it is said"),
            Variable("NVIDIA_CTK_CDI_HOOK_PATH", "changes nothing; it is said"),
            Variable("NVIDIA_CTK_CDI_GENERATE_LDCONFIG_PATH", "changes nothing; it is said"),
            Variable("NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS", "changes nothing; it is said"),
            Variable("NVIDIA_CTK_CDI_GENERATE_ENABLED_HOOKS", "an error"),
            Variable("NVIDIA_CTK_CDI_GENERATE_CSV_FILES", "an error"),
            Variable("NVIDIA_CTK_CDI_GENERATE_CSV_IGNORE_PATTERNS", "an error"),
            Variable("NVIDIA_CTK_CDI_GENERATE_CSV_COMPAT_CONTAINER_ROOT", "an error"),
            Variable("NVIDIA_CTK_CDI_SPEC_DIRS", "`cdi list --spec-dir`"),
            Variable("NVIDIA_DRIVER_ROOT", "`system … --driver-root`"),
            Variable("DRIVER_ROOT", "the same"),
            Variable("NVIDIA_DEV_ROOT", "`system … --dev-root`"),
            Variable("DEV_ROOT", "the same"),
            Variable("DEV_CHAR_PATH", "`system create-dev-char-symlinks --dev-char-path`"),
            Variable("CREATE_ALL", "`--create-all`"),
            Variable("LOAD_KERNEL_MODULES", "`system … --load-kernel-modules`"),
            Variable("CREATE_DEVICE_NODES", "`--create-device-nodes`"),
            Variable("WATCH", "an error"),
            Variable("DRY_RUN", "`system … --dry-run`"),
        ),
    ),
    Group(
        "For those who work on it",
        "",
        (
            Variable(
                "NVSHIM_PATIENCE",
                "by how much limits of time are multiplied, on a slow machine",
                "`1`",
            ),
            Variable(
                "SOURCE_DATE_EPOCH",
                "the time of all files that `make dist` makes, in seconds since 1970",
                "that of the commit",
            ),
            Variable(
                "NVSHIM_SIMULATED_FAULTS",
                "of a simulated node's NVML: which functions fail, and how "
                "(`nvmlInit=hang nvmlDeviceGetUUID=15`)",
            ),
        ),
    ),
    Group(
        "In the installer of a Kubernetes node",
        "Set in the DaemonSet of `nvshim node-installer`; see [Kubernetes](../kubernetes.md)."
        " All paths but `HOST_ROOT_MOUNT` are the node's. Those that do not begin with `NVSHIM_` "
        "are those of NVIDIA's installer.",
        _of_installer(),
    ),
)

ELSEWHERE: Final = {
    "CONTAINERD_SNAPSHOTTER": "set for ctr",
    "CRIU_CONFIG_FILE": "written for CRIU",
    "CUDA_MPS_LOG_DIRECTORY": "set for MPS control daemons",
    "CUDA_MPS_PIPE_DIRECTORY": "set for MPS control daemons and their clients",
    "CUDA_VISIBLE_DEVICES": "set for MPS control daemons",
    "NVIDIA_REQUIRE_CUDA": "one of NVIDIA_REQUIRE_*",
}
"""Names that the code has and nobody sets for us, with the reason."""


_HEAD: Final = """\
# Environment variables

What is read of a container's environment comes first, and is all that is read of it.
"""


def declared() -> frozenset[str]:
    """The names of the table."""
    return frozenset(variable.name for group in GROUPS for variable in group.variables)


def page() -> str:
    """The page of all variables."""
    parts = [_HEAD]
    for group in GROUPS:
        rows = [(code(v.name), v.meaning, v.default or "-") for v in group.variables]
        head = f"{group.head}\n\n" if group.head else ""
        parts.append(
            f"## {group.title}\n\n{head}{table(('variable', 'meaning', 'if not set'), rows)}"
        )
    return "\n".join(parts)
