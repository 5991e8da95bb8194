"""Running the node agent as ``nvshim node`` says. Who asks whether it is ready does without."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import click
import structlog

from api.errors import printable
from integration.apiserver.credentials import of_kubeconfig
from integration.cli.output import Format, serialized
from integration.node.agent import serve
from integration.node.faults.policy import policy_of
from integration.node.options import NO, YES, Options
from integration.node.settings.config_choice import FALLBACKS, Choice
from integration.node.settings.source import Source, as_document

if TYPE_CHECKING:
    from collections.abc import Callable

    from hooks.config import Config
    from integration.cli.node_options import Told
    from integration.cli.output import Output

# The options that say where the device plugin's settings come from.
_OF_SETTINGS: Final = frozenset({
    "config_file", "config_dir", "config_name_file", "node_label", "default_config", "fallbacks",
})  # fmt: skip


def run(
    output: Output,
    config: Config,
    told: Told,
    *,
    spec: str,
    poll: float,
    once: bool,
    check_config: bool,
    log_format: str,
) -> bool:
    """Run the agent, or check its settings.

    Args:
        spec: as :class:`Options` has it.
        poll: likewise.

    Returns:
        Whether something was wrong with the node when it was looked at once.
    """
    options = options_of(told, spec=spec, poll=poll)
    policy_of(config, options.ignored_xids, options.heeded_xids)  # what is wrong is said now
    if check_config:
        _show_settings(output, options)
        return False
    seen = anyio.run(functools.partial(serve, once=once), config, options, _log(log_format))
    return once and bool(seen.faults)


def options_of(told: Told, *, spec: str, poll: float) -> Options:
    """What the agent is to do.

    Args:
        told: by the command line.
        spec: as :class:`Options` has it.
        poll: likewise.

    Raises:
        SettingsError: a flag or variable says what means nothing.
        KubeconfigUnusable: the kubeconfig is none to ask with.
    """
    others = {k: v for k, v in told.others.items() if k not in _OF_SETTINGS}
    for name in ("kubelet_socket", "pod_resources"):
        others[name] = str(others[name]).removeprefix("unix://")
    if not others["kubelet_socket"]:
        if others["device_plugin"] == YES:
            raise click.UsageError("--device-plugin yes needs a --kubelet-socket")
        others["device_plugin"] = NO
    for name in ("dra", "node_condition"):
        if others[name] and not (others["api_server"] or others["kubeconfig"]):
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} needs an --api-server, or a --kubeconfig")
    if others["dra_mig"] and not others["dra"]:
        raise click.UsageError("--dra-mig needs --dra")
    if others["dra_shares"] and not others["dra"]:
        raise click.UsageError("--dra-shares needs --dra")
    if others["kubeconfig"]:
        of_kubeconfig(others["kubeconfig"])  # what is wrong is said now
    others["node_name"] = others["node_name"] or os.uname().nodename.lower()
    others["kernel_log"] = "" if others["kernel_log"] == "none" else others["kernel_log"]
    if not others["cri_sockets"]:
        del others["cri_sockets"]
    return Options(spec=spec, poll=poll, settings=_source(told), **others)


def _source(told: Told) -> Source:
    others = told.others
    file, directory = others["config_file"], others["config_dir"]
    if not directory:
        return Source(told.given, file)
    if file:
        raise click.UsageError("--config-file and --config-dir exclude each other")
    fallbacks = tuple(word for each in others["fallbacks"] for word in each.split(",") if word)
    for word in fallbacks:
        if word not in FALLBACKS:
            raise click.UsageError(
                f"--fallback-strategies: {word!r} is none of {', '.join(FALLBACKS)}"
            )
    choice = Choice(
        directory=directory,
        name_file=others["config_name_file"],
        default=others["default_config"],
        fallbacks=fallbacks,
        label=others["node_label"],
    )
    return Source(told.given, choice=choice)


def _show_settings(output: Output, options: Options) -> None:
    if options.settings is None:
        return
    settings = options.settings.load()
    for note in settings.notes:
        click.echo(printable(note), err=True)
    document = as_document(settings)
    output.text(serialized(document, Format.YAML), document)


def _encode(_logger: Any, _level: str, line: Any) -> bytes:
    data: bytes = line.encode(errors="backslashreplace")
    return data


def _log(form: str) -> Callable[..., None]:
    render: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    )
    # Without a buffer, in which a line that cannot be written would stay.
    fd = sys.stderr.fileno() if sys.stderr else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    stderr = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - for as long as we are
    logger = structlog.wrap_logger(
        structlog.BytesLogger(stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
            _encode,
        ],
    )

    def say(level: str, event: str, **fields: Any) -> None:
        # A full disk, or a reader that has gone, is no reason to give nobody a GPU.
        with suppress(OSError):
            getattr(logger, level)(event, **fields)

    return say
