"""A dead GPU does not take the node down: a selection of ``make test-chaos``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.trials import FAULTS, MOMENTS, Machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.simulated import SimulatedNode
    from tests.harness.runtime import Runtime


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        # test_lost_gpus.py has a lost GPU, test_node_monitor.py a hanging NVML.
        pytest.param("a GPU is lost", MOMENTS[-1], marks=pytest.mark.thorough),
        ("a GPU crashes NVML", "preferred"),
        pytest.param("NVML hangs", "start", marks=pytest.mark.thorough),
    ],
)
def test_seven_of_eight_go_on(
    ours: Runtime, configure: Callable[..., None], tmp_path: Path, fault: str, moment: str
) -> None:
    def of_node(node: SimulatedNode) -> None:
        with open(node.config_path, encoding="utf-8") as file:
            configure(file.read())

    with Machine(ours, str(tmp_path), of_node) as machine:
        outcome = machine.run(FAULTS[fault], moment)
    assert outcome.wasted <= 1
