"""The options of ``nvshim node``: the agent's own, and the flags of NVIDIA's device plugin.

Each of NVIDIA's flags has the same name, variable and meaning as there
(:mod:`integration.node.settings.table`), so a DaemonSet for that plugin keeps its arguments. The
values are passed on as text, because the rules and errors are those of the configuration file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from hooks.schema import Setting
from integration.cli.options import DirectoryPath, stacked
from integration.cli.setting_option import setting_option
from integration.node.options import OPTIONS
from integration.node.settings import config_choice
from integration.node.settings.readers import BOOLEAN
from integration.node.settings.table import FLAGS, NEUTRAL, Override

R = TypeVar("R")


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
        agent = {each.field: kwargs.pop(each.field) for each in _AGENT}
        plugin = tuple(each for each in values if each is not None)
        return command(*args, settings=CliSettings(plugin, agent), **kwargs)

    decorated: Callable[..., R] = answer
    for flag in reversed(FLAGS):
        decorated = _option(flag)(decorated)
    return stacked(*map(_agent_option, _AGENT))(decorated)


_AGENT: Final = (*OPTIONS, *config_choice.SETTINGS)
"""The agent's own options, and those that select the device plugin's settings."""


def _agent_option(setting: Setting) -> Callable[[Callable[..., R]], Callable[..., R]]:
    default = setting.default
    more: dict[str, Any] = {"default": default, "envvar": list(setting.variables)}
    if setting.field == "spec":  # its default depends on the configuration
        more["default"] = None
    elif setting.field == "states":
        more |= {"type": DirectoryPath(), "callback": None}
    if default not in ("", ()) and not isinstance(default, bool) and "[def" not in setting.text:
        more["show_default"] = True
    return setting_option(setting, **more)


# -- NVIDIA's flags ----------------------------------------------------------------------------


def parameter_of(flag: Setting) -> str:
    """Return the parameter name of a flag of NVIDIA's plugin."""
    return "setting_" + flag.options[0].lstrip("-").replace("-", "_")


def _option(flag: Setting) -> Callable[[Callable[..., R]], Callable[..., R]]:
    boolean: dict[str, Any] = {"is_flag": False, "flag_value": "true"}
    return click.option(
        *flag.options, parameter_of(flag), metavar=flag.kind.metavar, envvar=list(flag.variables),
        multiple=flag.kind.is_list, hidden=flag.is_ignored, help=_help(flag),
        **(boolean if flag.kind is BOOLEAN else {}),
    )  # fmt: skip


def _help(flag: Setting) -> str:
    if flag.key in NEUTRAL:
        return f"Changes nothing: {flag.text}."
    default = flag.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if flag.key == "flags.nvidiaDevRoot":
        default = "/"
    return flag.text if default in {"", None, False} else f"{flag.text}  [default: {default}]"


def _given(context: click.Context, flag: Setting, value: Any) -> Override | None:
    """Return a flag's value and origin; None if neither it nor its variable is set."""
    source = context.get_parameter_source(parameter_of(flag))
    if source is ParameterSource.ENVIRONMENT:
        origin = next(name for name in flag.variables if os.environ.get(name))
    elif source is ParameterSource.COMMANDLINE:
        origin = flag.options[0]
    else:
        return None
    return Override(flag.key, origin, tuple(value) if flag.kind.is_list else (value,))
