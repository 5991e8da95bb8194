"""Our configuration: D070 to D073."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hooks.config import Mode
from integration.doctor.findings import Trouble, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Policy


@check("D070")
def _unusable(policy: Policy) -> Iterator[Trouble]:
    if policy.fault:
        yield Trouble(policy.fault)


@check("D071")
def _believing(policy: Policy) -> Iterator[Trouble]:
    if policy.mode == Mode.NVIDIA:
        yield Trouble(f'mode = "{policy.mode}" by {policy.source or "default"}')


@check("D072")
def _meaningless(policy: Policy) -> Iterator[Trouble]:
    for note in policy.notes:
        yield Trouble(note)


@check("D073")
def _hooks(policy: Policy) -> Iterator[Trouble]:
    for program, fault in policy.hooks:
        yield Trouble(f"{program}: {fault}")
