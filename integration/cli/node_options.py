"""The options of ``nvshim node``: the agent's own, and the flags of NVIDIA's device plugin.

Each of NVIDIA's flags has the same name, variable and meaning as there
(:mod:`integration.node.settings.table`), so a DaemonSet for that plugin keeps its arguments. The
values are passed on as text, because the rules and errors are those of the configuration file.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from integration.node.options import DRA_DRIVER
from integration.node.services.metrics.address import parse_address
from integration.node.settings.readers import BOOLEAN
from integration.node.settings.table import FLAGS, Override, Setting

R = TypeVar("R")

_LONGEST_DRIVER: Final = 63
_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_UID: Final = re.compile("[A-Za-z0-9-]{1,63}", re.ASCII)

_KUBELET: Final = "/var/lib/kubelet/device-plugins/kubelet.sock"
_POD_RESOURCES: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"


class CliSettings(NamedTuple):
    """The settings of the command line, for the device plugin and for the agent."""

    plugin: tuple[Override, ...]  # the plugin's settings that flags or variables set
    agent: dict[str, Any]  # the values of the agent's own options, by name


def agent_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the agent's options to a command, which gets them as ``settings: CliSettings``."""

    @functools.wraps(command)
    def answer(*args: Any, **kwargs: Any) -> R:
        context = click.get_current_context()
        values = [_given(context, flag, kwargs.pop(parameter_of(flag))) for flag in FLAGS]
        agent = {name: kwargs.pop(name) for name in _AGENT_OPTIONS}
        plugin = tuple(each for each in values if each is not None)
        return command(*args, settings=CliSettings(plugin, agent), **kwargs)

    decorated: Callable[..., R] = answer
    for flag in reversed(FLAGS):
        decorated = _option(flag)(decorated)
    for option in reversed(_AGENT_OPTIONS.values()):
        decorated = option(decorated)
    return decorated


# -- NVIDIA's flags ----------------------------------------------------------------------------


def parameter_of(flag: Setting) -> str:
    """Return the parameter name of a flag of NVIDIA's plugin."""
    return "setting_" + flag.name.replace("-", "_")


def _option(flag: Setting) -> Callable[[Callable[..., R]], Callable[..., R]]:
    names = [f"--{name}" for name in (flag.name, *flag.aliases)]
    boolean: dict[str, Any] = {"is_flag": False, "flag_value": "true"}
    return click.option(
        *names, parameter_of(flag), metavar=flag.kind.metavar, envvar=list(flag.variables),
        multiple=flag.repeated, hidden=flag.ignored, help=flag.help,
        **(boolean if flag.kind is BOOLEAN else {}),
    )  # fmt: skip


def _given(context: click.Context, flag: Setting, value: Any) -> Override | None:
    """Return a flag's value and origin; None if neither it nor its variable is set."""
    source = context.get_parameter_source(parameter_of(flag))
    if source is ParameterSource.ENVIRONMENT:
        origin = next(name for name in flag.variables if os.environ.get(name))
    elif source is ParameterSource.COMMANDLINE:
        origin = f"--{flag.name}"
    else:
        return None
    return Override(flag.path, origin, tuple(value) if flag.repeated else (value,))


# -- the agent's own options -------------------------------------------------------------------


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    del context, parameter
    if value in {"", "none"}:
        return ""
    parse_address(value)
    return value


def _uid(context: click.Context, parameter: click.Parameter, value: str) -> str:
    del context, parameter
    if value and not _UID.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a pod's UID")
    return value


def _driver(context: click.Context, parameter: click.Parameter, value: str) -> str:
    del context, parameter
    if len(value) > _LONGEST_DRIVER or not _SUBDOMAIN.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is not a DNS name of at most {_LONGEST_DRIVER} lower-case letters, digits,"
            " hyphens and dots"
        )
    return value


_AGENT_OPTIONS: Final[dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "device_plugin": click.option(
        "--device-plugin", type=click.Choice(["auto", "yes", "no"]), default="auto",
        show_default=True,
        help="Run the device plugin; auto: if a kubelet runs here and no other plugin serves it.",
    ),
    "kubelet_socket": click.option(
        "--kubelet-socket", metavar="SOCKET", envvar="KUBELET_SOCKET", default=_KUBELET,
        show_default=True, help="The kubelet's socket for registering device plugins; '' for none.",
    ),
    "pod_resources": click.option(
        "--pod-resources", metavar="SOCKET", default=_POD_RESOURCES, show_default=True,
        help="The kubelet's socket that lists the devices of pods.",
    ),
    "metrics": click.option(
        "--metrics", metavar="ADDRESS:PORT", default="", callback=_address,
        help="Serve /metrics at this address, such as :9477.  [default: do not serve]",
    ),
    "cri_sockets": click.option(
        "--cri-socket", "cri_sockets", metavar="SOCKET", multiple=True,
        help="The engine's CRI socket, to check whether the engine reads CDI names.  "
        "[default: the known sockets that exist]",
    ),
    "api_server": click.option(
        "--api-server", metavar="HOST", default="", envvar="KUBERNETES_SERVICE_HOST",
        help="The cluster's API server, for events on pods; '' for none.",
    ),
    "api_port": click.option(
        "--api-port", metavar="PORT", type=click.IntRange(1, 65535), default=443,
        show_default=True, envvar="KUBERNETES_SERVICE_PORT", help="The API server's port.",
    ),
    "service_account": click.option(
        "--service-account", metavar="DIR",
        default="/run/containerd-shim-nvidia/service-account", show_default=True,
        help="The directory with the agent's token; without a token no events are sent.",
    ),
    "kubeconfig": click.option(
        "--kubeconfig", metavar="FILE", default="",
        help="Use this kubeconfig instead of the three options above: its current context, with a"
        " token or a client certificate, such as the kubelet's own.",
    ),
    "api_timeout": click.option(
        "--api-timeout", metavar="SECONDS", type=click.FloatRange(0.1, 15), default=10,
        show_default=True, help="The time limit of a call to the API server.",
    ),
    "dra": click.option(
        "--dra", is_flag=True,
        help="Run a driver for dynamic resource allocation: publish the node's devices and prepare"
        " resource claims, with or without the device plugin.",
    ),
    "dra_driver": click.option(
        "--dra-driver", metavar="NAME", default=DRA_DRIVER, show_default=True, callback=_driver,
        help="The DRA driver's name. gpu.nvidia.com replaces NVIDIA's driver.",
    ),
    "dra_unhealthy": click.option(
        "--dra-unhealthy", type=click.Choice(["taint", "evict", "omit"]), default="taint",
        show_default=True,
        help="How to publish unhealthy, lost and out-of-service devices: with taints (NoSchedule),"
        " also evicting their pods (NoExecute), or not at all.",
    ),
    "dra_shares": click.option(
        "--dra-shares", metavar="N", type=click.IntRange(0, 64), default=0, show_default=True,
        help="Publish each GPU and MIG device with N shares, so that N claims can use it; 0 for"
        " exclusive use.",
    ),
    "dra_mig": click.option(
        "--dra-mig", is_flag=True,
        help="Create MIG devices on demand for resource claims, and destroy them afterwards: on"
        " GPUs in MIG mode, and on GPUs that enter it without a reset (Hopper and newer).",
    ),
    "node_condition": click.option(
        "--node-condition", is_flag=True,
        help="Report GPUs that no pod can use in the Node's condition GPUOutOfService.",
    ),
    "node_name": click.option(
        "--node-name", metavar="NAME", default="", envvar="NODE_NAME",
        help="The node's name in the cluster.  [default: the host's name]",
    ),
    "pod_uid": click.option(
        "--pod-uid", metavar="UID", default="", envvar="POD_UID", callback=_uid,
        help="The UID of the agent's pod, for rolling updates: with --dra the agent forwards the"
        " kubelet's calls to the old pod's agent until that has stopped.",
    ),
    "states": click.option(
        "--containerd-state", "--state", "states", metavar="DIR", multiple=True,
        envvar="NVSHIM_CONTAINERD_STATE", type=click.Path(file_okay=False),
        help="containerd's state directory; repeatable.  [default: those of distribution packages,"
        " Docker, k3s, k0s and MicroK8s]",
    ),
    "kernel_log": click.option(
        "--kernel-log", metavar="FILE", default="/dev/kmsg", show_default=True,
        help="Read the kernel log from this file; 'none' to not read it.",
    ),
    "ignored_xids": click.option(
        "--disable-healthchecks", "ignored_xids", metavar="XIDS", default="",
        envvar="DP_DISABLE_HEALTHCHECKS",
        help="Ignore these additional XIDs in health checks: a comma-separated list, or all.",
    ),
    "heeded_xids": click.option(
        "--enable-healthchecks", "heeded_xids", metavar="XIDS", default="",
        envvar="DP_ENABLE_HEALTHCHECKS",
        help="Honour these XIDs even if they are ignored by default or by --disable-healthchecks: a"
        " comma-separated list, or all.",
    ),
    "config_file": click.option(
        "--config-file", metavar="FILE", default="", envvar="CONFIG_FILE",
        help="The device plugin's configuration file, in the format of NVIDIA's plugin. It is read"
        " again when it changes.",
    ),
    "config_dir": click.option(
        "--config-dir", "--config-file-srcdir", "config_dir", metavar="DIR", default="",
        envvar="CONFIG_FILE_SRCDIR",
        help="A directory of configuration files; one is selected by name.",
    ),
    "config_name_file": click.option(
        "--config-name-file", metavar="FILE", default="",
        help="A file with that name, or with node labels that include --node-label.",
    ),
    "node_label": click.option(
        "--node-label", metavar="LABEL", default="nvidia.com/device-plugin.config",
        show_default=True, envvar="NODE_LABEL", help="The node label with the name.",
    ),
    "default_config": click.option(
        "--default-config", metavar="NAME", default="", envvar="DEFAULT_CONFIG",
        help="The name to use if none is set.",
    ),
    "fallbacks": click.option(
        "--fallback-strategies", "fallbacks", metavar="named|single|empty", multiple=True,
        default=("named,single",), show_default=True, envvar="FALLBACK_STRATEGIES",
        help="Without any name, try in this order: the file called default (named), the only file"
        " (single), no file (empty).",
    ),
}  # fmt: skip
"""The agent's own options, by parameter name."""
