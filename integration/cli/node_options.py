"""The options of ``nvshim node``: what the agent is to do, and NVIDIA's flags of its device plugin.

Each of NVIDIA's flags has the name, the variable and the meaning that it has there
(:mod:`integration.node.settings.table`), so that a DaemonSet made for that plugin needs no
other arguments. They are read as texts: what they may say is the same as in the file, and so is the
error.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from integration.node.options import DRA_DRIVER
from integration.node.services.metrics.address import parse_address
from integration.node.settings.readers import BOOLEAN
from integration.node.settings.table import FLAGS, Given

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.node.settings.table import Setting

R = TypeVar("R")

_LONGEST_DRIVER: Final = 63
_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_UID: Final = re.compile("[A-Za-z0-9-]{1,63}", re.ASCII)

_KUBELET: Final = "/var/lib/kubelet/device-plugins/kubelet.sock"
_POD_RESOURCES: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"


class Told(NamedTuple):
    """What the command line says of the device plugin's settings, and of all other parts."""

    given: tuple[Given, ...]  # the settings that flags or variables say
    others: dict[str, Any]  # the values of the other options, by their names


def agent_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options of the agent's parts, as ``told``, a :class:`Told`."""

    @functools.wraps(command)
    def answer(*args: Any, **kwargs: Any) -> R:
        context = click.get_current_context()
        given = [_given(context, flag, kwargs.pop(parameter_of(flag))) for flag in FLAGS]
        others = {name: kwargs.pop(name) for name in _OTHERS}
        return command(
            *args, told=Told(tuple(each for each in given if each is not None), others), **kwargs
        )

    decorated: Callable[..., R] = answer
    for flag in reversed(FLAGS):
        decorated = _option(flag)(decorated)
    for option in reversed(_OTHERS.values()):
        decorated = option(decorated)
    return decorated


# -- NVIDIA's flags ----------------------------------------------------------------------------


def parameter_of(flag: Setting) -> str:
    """The name of the value that a flag of NVIDIA's plugin gives."""
    return "setting_" + flag.name.replace("-", "_")


def _option(flag: Setting) -> Callable[[Callable[..., R]], Callable[..., R]]:
    names = [f"--{name}" for name in (flag.name, *flag.aliases)]
    boolean: dict[str, Any] = {"is_flag": False, "flag_value": "true"}
    return click.option(
        *names, parameter_of(flag), metavar=flag.kind.metavar, envvar=list(flag.variables),
        multiple=flag.repeated, hidden=flag.ignored, help=flag.help,
        **(boolean if flag.kind is BOOLEAN else {}),
    )  # fmt: skip


def _given(context: click.Context, flag: Setting, value: Any) -> Given | None:
    """What a flag says; None if neither it nor its variable is given."""
    source = context.get_parameter_source(parameter_of(flag))
    if source is ParameterSource.ENVIRONMENT:
        origin = next(name for name in flag.variables if os.environ.get(name))
    elif source is ParameterSource.COMMANDLINE:
        origin = f"--{flag.name}"
    else:
        return None
    return Given(flag.path, origin, tuple(value) if flag.repeated else (value,))


# -- the others --------------------------------------------------------------------------------


def _address(context: click.Context, parameter: click.Parameter, value: str) -> str:
    del context, parameter
    if value in {"", "none"}:
        return ""
    parse_address(value)
    return value


def _uid(context: click.Context, parameter: click.Parameter, value: str) -> str:
    del context, parameter
    if value and not _UID.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no UID of a pod")
    return value


def _driver(context: click.Context, parameter: click.Parameter, value: str) -> str:
    del context, parameter
    if len(value) > _LONGEST_DRIVER or not _SUBDOMAIN.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is no DNS name of at most {_LONGEST_DRIVER} lower-case letters, digits,"
            " hyphens and dots"
        )
    return value


_OTHERS: Final[dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "device_plugin": click.option(
        "--device-plugin", type=click.Choice(["auto", "yes", "no"]), default="auto",
        show_default=True,
        help="Serve the kubelet: auto if there is one here, and no other plugin for its resources.",
    ),
    "kubelet_socket": click.option(
        "--kubelet-socket", metavar="SOCKET", envvar="KUBELET_SOCKET", default=_KUBELET,
        show_default=True, help="Where the kubelet registers device plugins; '' for none.",
    ),
    "pod_resources": click.option(
        "--pod-resources", metavar="SOCKET", default=_POD_RESOURCES, show_default=True,
        help="Where the kubelet tells what it has given to whom.",
    ),
    "metrics": click.option(
        "--metrics", metavar="ADDRESS:PORT", default="", callback=_address,
        help="Serve /metrics there, say at :9477.  [default: nowhere]",
    ),
    "cri_sockets": click.option(
        "--cri-socket", "cri_sockets", metavar="SOCKET", multiple=True,
        help="Where the engine serves the kubelet: it is asked whether it reads CDI names.  "
        "[default: where engines are known to]",
    ),
    "api_server": click.option(
        "--api-server", metavar="HOST", default="", envvar="KUBERNETES_SERVICE_HOST",
        help="The cluster's API server, for events on pods; '' for none.",
    ),
    "api_port": click.option(
        "--api-port", metavar="PORT", type=click.IntRange(1, 65535), default=443,
        show_default=True, envvar="KUBERNETES_SERVICE_PORT", help="Its port.",
    ),
    "service_account": click.option(
        "--service-account", metavar="DIR",
        default="/run/containerd-shim-nvidia/service-account", show_default=True,
        help="Where the agent's token for it is; if there is none, nothing is said there.",
    ),
    "kubeconfig": click.option(
        "--kubeconfig", metavar="FILE", default="",
        help="How the API server is asked, in place of the three above: its current context, with"
        " a token or a client certificate, as a kubelet's own has them.",
    ),
    "api_timeout": click.option(
        "--api-timeout", metavar="SECONDS", type=click.FloatRange(0.1, 15), default=10,
        show_default=True, help="How long a call to the API server may take.",
    ),
    "dra": click.option(
        "--dra", is_flag=True,
        help="Be a driver of dynamic resource allocation: publish the node's devices and prepare"
        " resource claims, beside the device plugin or without it.",
    ),
    "dra_driver": click.option(
        "--dra-driver", metavar="NAME", default=DRA_DRIVER, show_default=True, callback=_driver,
        help="What the driver is called. gpu.nvidia.com takes the place of NVIDIA's.",
    ),
    "dra_unhealthy": click.option(
        "--dra-unhealthy", type=click.Choice(["taint", "evict", "omit"]), default="taint",
        show_default=True,
        help="Devices that are unhealthy, lost or out of service: publish them with taints"
        " (NoSchedule), evict their pods as well (NoExecute), or leave them out.",
    ),
    "dra_shares": click.option(
        "--dra-shares", metavar="N", type=click.IntRange(0, 64), default=0, show_default=True,
        help="Publish each GPU and MIG device with N shares, so that so many claims can have a part"
        " of it; 0 for whole ones.",
    ),
    "dra_mig": click.option(
        "--dra-mig", is_flag=True,
        help="Make MIG devices for resource claims, and undo them: on GPUs that are in MIG mode,"
        " and on those whose mode can be switched without a reset (Hopper and newer).",
    ),
    "node_condition": click.option(
        "--node-condition", is_flag=True,
        help="Say on the Node, as its condition GPUOutOfService, which GPUs no pod can have.",
    ),
    "node_name": click.option(
        "--node-name", metavar="NAME", default="", envvar="NODE_NAME",
        help="What the node is called in the cluster.  [default: the host's name]",
    ),
    "pod_uid": click.option(
        "--pod-uid", metavar="UID", default="", envvar="POD_UID", callback=_uid,
        help="The agent's pod, if another's may run beside it: with --dra it then waits for the end"
        " of that one, and passes on to it what the kubelet asks.",
    ),
    "states": click.option(
        "--containerd-state", "--state", "states", metavar="DIR", multiple=True,
        envvar="NVSHIM_CONTAINERD_STATE", type=click.Path(file_okay=False),
        help="Where containerd keeps its state; may be given several times. By default where"
        " packages, Docker, k3s, k0s and MicroK8s have it.",
    ),
    "kernel_log": click.option(
        "--kernel-log", metavar="FILE", default="/dev/kmsg", show_default=True,
        help="Where the kernel's log is read; 'none' for nowhere.",
    ),
    "ignored_xids": click.option(
        "--disable-healthchecks", "ignored_xids", metavar="XIDS", default="",
        envvar="DP_DISABLE_HEALTHCHECKS",
        help="XIDs that make no device unhealthy, besides those that never do: a comma list, or"
        " all.",
    ),
    "heeded_xids": click.option(
        "--enable-healthchecks", "heeded_xids", metavar="XIDS", default="",
        envvar="DP_ENABLE_HEALTHCHECKS",
        help="XIDs that do all the same: a comma list, or all.",
    ),
    "config_file": click.option(
        "--config-file", metavar="FILE", default="", envvar="CONFIG_FILE",
        help="The device plugin's configuration, as NVIDIA's has it. It is read again when it"
        " changes.",
    ),
    "config_dir": click.option(
        "--config-dir", "--config-file-srcdir", "config_dir", metavar="DIR", default="",
        envvar="CONFIG_FILE_SRCDIR", help="Several of them, of which one is chosen by its name.",
    ),
    "config_name_file": click.option(
        "--config-name-file", metavar="FILE", default="",
        help="Has that name, or labels that the kubelet wrote, one of which is --node-label.",
    ),
    "node_label": click.option(
        "--node-label", metavar="LABEL", default="nvidia.com/device-plugin.config",
        show_default=True, envvar="NODE_LABEL", help="The label that says the name.",
    ),
    "default_config": click.option(
        "--default-config", metavar="NAME", default="", envvar="DEFAULT_CONFIG",
        help="The name if none is said.",
    ),
    "fallbacks": click.option(
        "--fallback-strategies", "fallbacks", metavar="named|single|empty", multiple=True,
        default=("named,single",), show_default=True, envvar="FALLBACK_STRATEGIES",
        help="What holds without any name: the one called default, the only one, none; in this"
        " order.",
    ),
}  # fmt: skip
"""Every other option, by the name of its value."""
