"""What counts as lost by a restart of the agent."""

from __future__ import annotations

import pytest

from integration.verify.checks import agent


@pytest.mark.parametrize(
    ("before", "now", "differing"),
    [
        ("healthy", "healthy", ""),
        ("suspect", "healthy", ""),
        ("recovering", "healthy", ""),
        ("recovering", "suspect", ""),
        ("unhealthy", "healthy", "GPU-a was unhealthy and is healthy"),
        ("unhealthy", "recovering", "GPU-a was unhealthy and is recovering"),
        ("healthy", "suspect", "GPU-a was healthy and is suspect"),
        ("suspect", "unhealthy", "GPU-a was suspect and is unhealthy"),
        ("healthy", None, "GPU-a was healthy and is not known"),
    ],
)
def test_a_device_may_heal_and_nothing_else(before: str, now: str | None, differing: str) -> None:
    found = {"GPU-b": "healthy"} | ({} if now is None else {"GPU-a": now})
    assert agent._differing({"GPU-a": before}, found) == differing
