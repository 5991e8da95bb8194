"""Run the node agent with the options of ``nvshim node``; not imported for ``--ready``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import anyio
import click

from api.errors import printable
from hooks.config import Config
from integration.apiserver.credentials import of_kubeconfig
from integration.cli.node_options import CliSettings
from integration.cli.output import Format, Output, serialized
from integration.node.agent import serve
from integration.node.faults.policy import policy_of
from integration.node.options import NO, NODE, NODE_FEATURE, OPTIONS, YES, Options
from integration.node.services.metrics.address import parse_address
from integration.node.settings.config_choice import SETTINGS as CHOICES
from integration.node.settings.config_choice import Choice
from integration.node.settings.source import Source, as_document
from shim.syscalls import give_back_large_blocks, use_one_heap


def run(
    output: Output,
    config: Config,
    settings: CliSettings,
    *,
    once: bool,
    check_config: bool,
    log_format: str,
) -> bool:
    """Run the agent, or check its settings.

    Args:
        settings: the device plugin's and the agent's settings.

    Returns:
        With ``once``, whether the node has a fault.
    """
    options = options_of(settings)
    policy_of(config, options.ignored_xids, options.heeded_xids)  # report a wrong value at start
    if check_config:
        _show_settings(output, options)
        return False
    give_back_large_blocks()
    use_one_heap()
    node = anyio.run(functools.partial(serve, once=once), config, options, _log(log_format))
    return once and bool(node.faults)


# Options that mean nothing without another one.
_NEEDS: Final = {
    "dra_mig": "dra",
    "dra_shares": "dra",
    "dra_metadata": "dra",
    "nvsentinel_acts": "nvsentinel",
}


def options_of(settings: CliSettings) -> Options:
    """Return the agent's options.

    Args:
        settings: from the command line.

    Raises:
        SettingsError: a flag or variable has an invalid value.
        KubeconfigUnusable: the kubeconfig cannot be used.
        MetricsAddressInvalid: the address of /metrics is not valid.
        WebConfigInvalid: the web configuration file of /metrics is missing or wrong.
    """
    others = {each.field: settings.agent[each.field] for each in OPTIONS}
    if not others["kubelet_socket"]:
        if others["device_plugin"] == YES:
            raise click.UsageError("--device-plugin yes needs a --kubelet-socket.")
        others["device_plugin"] = NO
    _check_required_options(others)
    if others["kubeconfig"]:
        of_kubeconfig(others["kubeconfig"])  # report an unusable file at start
    others["node_name"] = others["node_name"] or os.uname().nodename.lower()
    if others["metrics"]:
        parse_address(others["metrics"])  # report a wrong one at start
    if others["metrics_web_config"]:
        from integration.node.services.metrics.web import read  # noqa: PLC0415 - takes memory

        read(others["metrics_web_config"])  # the same
    return Options(**others, settings=_source(settings))


def _check_required_options(others: Mapping[str, Any]) -> None:
    """Check that each option has the other options that it requires.

    Raises:
        click.UsageError: one is missing.
    """
    needed_for = [name for name in ("dra", "node_condition", "mig_config_file") if others[name]]
    if others["node_labels"] in {NODE, NODE_FEATURE}:
        needed_for.append("node_labels")
    for name in needed_for:
        if not (others["api_server"] or others["kubeconfig"]):
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} needs an --api-server or a --kubeconfig.")
    for name, needed in _NEEDS.items():
        if others[name] and not others[needed]:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --{needed}.")


def _source(settings: CliSettings) -> Source:
    choice = Choice(**{each.field: settings.agent[each.field] for each in CHOICES})
    if not choice.directory:
        return Source(settings.plugin, choice.file)
    if choice.file:
        raise click.UsageError("Use either --config-file or --config-dir, not both.")
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


def _import_structlog() -> Any:
    """Import structlog without rich, which it would import for tracebacks on a terminal.

    That is 4 MB in 70 modules, which the agent does not use.

    Source: the Python reference, "The import system", "The module cache".
    """
    modules: dict[str, Any] = sys.modules
    rich = modules.get("rich")
    modules["rich"] = None  # importing it fails, as if it were not installed
    try:
        import structlog  # noqa: PLC0415 - without rich
    finally:
        del modules["rich"]
        if rich is not None:
            modules["rich"] = rich
    return structlog


def _log(form: str) -> Callable[..., None]:
    structlog = _import_structlog()
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
    ).bind()  # otherwise each line would create a logger

    def log(level: str, event: str, **fields: Any) -> None:
        # A full disk or a closed pipe must not stop the agent.
        with suppress(OSError):
            getattr(logger, level)(event, **fields)

    return log
