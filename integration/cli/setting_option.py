"""Options that set a declared setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from hooks.schema import BOOLEAN, Kind, Setting, WrongValue

R = TypeVar("R")

_NUMBERS: Final = frozenset({"N", "PORT", "SECONDS"})  # their help has the range


class _OfKind(click.ParamType[Any]):
    """The value of an option, which is of a kind that settings have."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.name = kind.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text; click also passes defaults, which need not be texts."""
        try:
            return self._kind.parse(value) if isinstance(value, str) else self._kind.check(value)
        except WrongValue as error:
            self.fail(f"{error.value!r}; it must be {error.wanted_text}.", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the words of the kind, and paths."""
        del ctx, param
        if self.name in {"FILE", "DIR"}:
            return [CompletionItem(incomplete, type=self.name.lower())]
        return [CompletionItem(word) for word in self._kind.words if word.startswith(incomplete)]


def setting_option(setting: Setting, **more: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return the option that sets a setting; the parameter has the name of its field.

    Args:
        setting: has at least one name of an option.
        more: other arguments for click.
    """
    kind, text = setting.kind, setting.text
    if not text.endswith((".", "]")):
        text = f"{text[0].upper()}{text[1:]}."
    if kind.metavar in _NUMBERS:
        text += f"  [{kind.wanted}]"
    how: dict[str, Any] = {"help": text}
    if kind is BOOLEAN:
        how |= {"is_flag": True}
    else:
        how |= {"type": _OfKind(kind), "metavar": kind.metavar}
    if kind.is_list:
        how |= {"multiple": True, "callback": _united}
    return click.option(*setting.options, setting.field, **(how | more))


def _united(
    ctx: click.Context, param: click.Parameter, values: tuple[tuple[Any, ...], ...]
) -> tuple[Any, ...]:
    """Unite the lists of a repeated option."""
    del ctx, param
    return tuple(entry for entries in values for entry in entries)
