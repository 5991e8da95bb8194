"""What the Node says of its GPUs."""

from __future__ import annotations

from hooks.node.drained import DRIVER, Drain
from integration.node.health.machine import Condition
from integration.node.health.node_condition import said_of
from integration.node.health.values import State

ILL = Condition(State.UNHEALTHY, reason="Xid 79")
BACK = Condition(State.RECOVERING)
WELL = {"GPU-a": Condition(), "GPU-b": Condition(State.SUSPECT, reason="Xid 8")}


def test_what_is_given_is_no_reason() -> None:
    assert said_of([], WELL) == ("False", "AllInService", "every GPU can be given")
    assert said_of([], {}).status == "False"


def test_each_device_that_no_pod_can_have_is_named_once_with_its_reason() -> None:
    told = said_of([], {**WELL, "GPU-d": BACK, "GPU-c": ILL})
    assert told == ("True", "Unhealthy", "GPU-c is unhealthy: Xid 79; GPU-d is recovering")
    told = said_of([Drain("GPU-c", reason="fan")], {**WELL, "GPU-c": ILL})
    assert told == ("True", "Drained", "GPU-c is out of service fan")
    told = said_of([Drain(DRIVER)], {"GPU-c": ILL})
    assert told[:2] == ("True", "DrainedAndUnhealthy")
    assert told.message.startswith("the driver is out of service without a word of why; GPU-c is ")


def test_a_message_has_an_end() -> None:
    told = said_of([Drain(f"GPU-{n:04}", reason="x" * 99) for n in range(64)], {})
    assert len(told.message) == 1025
    assert told.message.endswith("…")
