"""The options of ``nvshim node``: the agent's own, and the flags of NVIDIA's device plugin.

Each of NVIDIA's flags has the same name, variable and meaning as there
(:mod:`integration.node.settings.table`), so a DaemonSet for that plugin keeps its arguments. The
values are passed on as text, because the rules and errors are those of the configuration file.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from integration.cli.options import setting_option, stacked
from integration.node.options import OPTIONS
from integration.node.settings import config_choice
from integration.node.settings.readers import BOOLEAN
from integration.node.settings.table import FLAGS, Override

if TYPE_CHECKING:
    from collections.abc import Callable

    from hooks.schema import Setting
    from integration.node.settings.table import Setting as PluginSetting

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
        more |= {"type": click.Path(file_okay=False), "callback": None}
    if default not in ("", ()) and not isinstance(default, bool) and "[def" not in setting.text:
        more["show_default"] = True
    return setting_option(setting, **more)


# -- NVIDIA's flags ----------------------------------------------------------------------------


def parameter_of(flag: PluginSetting) -> str:
    """Return the parameter name of a flag of NVIDIA's plugin."""
    return "setting_" + flag.name.replace("-", "_")


def _option(flag: PluginSetting) -> Callable[[Callable[..., R]], Callable[..., R]]:
    names = [f"--{name}" for name in (flag.name, *flag.aliases)]
    boolean: dict[str, Any] = {"is_flag": False, "flag_value": "true"}
    return click.option(
        *names, parameter_of(flag), metavar=flag.kind.metavar, envvar=list(flag.variables),
        multiple=flag.repeated, hidden=flag.ignored, help=flag.help,
        **(boolean if flag.kind is BOOLEAN else {}),
    )  # fmt: skip


def _given(context: click.Context, flag: PluginSetting, value: Any) -> Override | None:
    """Return a flag's value and origin; None if neither it nor its variable is set."""
    source = context.get_parameter_source(parameter_of(flag))
    if source is ParameterSource.ENVIRONMENT:
        origin = next(name for name in flag.variables if os.environ.get(name))
    elif source is ParameterSource.COMMANDLINE:
        origin = f"--{flag.name}"
    else:
        return None
    return Override(flag.path, origin, tuple(value) if flag.repeated else (value,))
