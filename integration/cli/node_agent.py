"""Run the node agent with the options of ``nvshim node``; not imported for ``--ready``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import anyio
import click
import structlog

from api.errors import printable
from hooks.config import Config
from integration.apiserver.credentials import of_kubeconfig
from integration.cli.node_options import CliSettings
from integration.cli.output import Format, Output, serialized
from integration.node.agent import serve
from integration.node.faults.policy import policy_of
from integration.node.options import NO, YES, Options
from integration.node.settings.config_choice import FALLBACKS, Choice
from integration.node.settings.source import Source, as_document

# The options that select the source of the device plugin's settings.
_SOURCE_OPTIONS: Final = frozenset({
    "config_file", "config_dir", "config_name_file", "node_label", "default_config", "fallbacks",
})  # fmt: skip


def run(
    output: Output,
    config: Config,
    settings: CliSettings,
    *,
    spec: str,
    poll: float,
    once: bool,
    check_config: bool,
    log_format: str,
) -> bool:
    """Run the agent, or check its settings.

    Args:
        settings: the device plugin's and the agent's settings.
        spec: as in :class:`Options`.
        poll: as in :class:`Options`.

    Returns:
        With ``once``, whether the node has a fault.
    """
    options = options_of(settings, spec=spec, poll=poll)
    policy_of(config, options.ignored_xids, options.heeded_xids)  # report a wrong value at start
    if check_config:
        _show_settings(output, options)
        return False
    node = anyio.run(functools.partial(serve, once=once), config, options, _log(log_format))
    return once and bool(node.faults)


def options_of(settings: CliSettings, *, spec: str, poll: float) -> Options:
    """Return the agent's options.

    Args:
        settings: from the command line.
        spec: as in :class:`Options`.
        poll: as in :class:`Options`.

    Raises:
        SettingsError: a flag or variable has an invalid value.
        KubeconfigUnusable: the kubeconfig cannot be used.
    """
    others = {k: v for k, v in settings.agent.items() if k not in _SOURCE_OPTIONS}
    for name in ("kubelet_socket", "pod_resources"):
        others[name] = str(others[name]).removeprefix("unix://")
    if not others["kubelet_socket"]:
        if others["device_plugin"] == YES:
            raise click.UsageError("--device-plugin yes needs a --kubelet-socket.")
        others["device_plugin"] = NO
    for name in ("dra", "node_condition"):
        if others[name] and not (others["api_server"] or others["kubeconfig"]):
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} needs an --api-server or a --kubeconfig.")
    if others["dra_mig"] and not others["dra"]:
        raise click.UsageError("--dra-mig needs --dra.")
    if others["dra_shares"] and not others["dra"]:
        raise click.UsageError("--dra-shares needs --dra.")
    if others["kubeconfig"]:
        of_kubeconfig(others["kubeconfig"])  # report an unusable file at start
    others["node_name"] = others["node_name"] or os.uname().nodename.lower()
    others["kernel_log"] = "" if others["kernel_log"] == "none" else others["kernel_log"]
    if not others["cri_sockets"]:
        del others["cri_sockets"]
    return Options(spec=spec, poll=poll, settings=_source(settings), **others)


def _source(settings: CliSettings) -> Source:
    others = settings.agent
    file, directory = others["config_file"], others["config_dir"]
    if not directory:
        return Source(settings.plugin, file)
    if file:
        raise click.UsageError("Use either --config-file or --config-dir, not both.")
    fallbacks = tuple(word for each in others["fallbacks"] for word in each.split(",") if word)
    for word in fallbacks:
        if word not in FALLBACKS:
            raise click.UsageError(
                f"--fallback-strategies: {word!r} is not one of {', '.join(FALLBACKS)}."
            )
    choice = Choice(
        directory=directory,
        name_file=others["config_name_file"],
        default=others["default_config"],
        fallbacks=fallbacks,
        label=others["node_label"],
    )
    return Source(settings.plugin, choice=choice)


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
    # Unbuffered: a line that cannot be written must not stay in a buffer.
    fd = sys.stderr.fileno() if sys.stderr else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    stderr = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - open until the process exits
    logger = structlog.wrap_logger(
        structlog.BytesLogger(stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
            _encode,
        ],
    )

    def log(level: str, event: str, **fields: Any) -> None:
        # A full disk or a closed pipe must not stop the agent.
        with suppress(OSError):
            getattr(logger, level)(event, **fields)

    return log
