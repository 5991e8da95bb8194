"""The shim's configuration: D070 to D073."""

from __future__ import annotations

from collections.abc import Iterable

from hooks.config import Mode
from integration.doctor.facts import Policy
from integration.doctor.findings import check


@check("D070")
def _unusable(policy: Policy) -> Iterable[str]:
    return filter(None, [policy.fault])


@check("D071")
def _trusts_images(policy: Policy) -> Iterable[str]:
    setting = f'mode = "{policy.mode}" in {policy.source or "the defaults"}'
    return [setting] if policy.mode == Mode.NVIDIA else ()


@check("D072")
def _meaningless(policy: Policy) -> Iterable[str]:
    return policy.notes


@check("D073")
def _hooks(policy: Policy) -> Iterable[str]:
    return map(": ".join, policy.hooks)
