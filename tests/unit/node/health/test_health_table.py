"""The devices that an event, an inventory or a sample concerns."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.config import Config
from integration.node.device_health.device_state import Moment, Need, Rules
from integration.node.device_health.health_table import (
    HealthTable,
    Place,
    after_clear,
    after_event,
    after_inventory,
    after_sample,
    after_watch,
    judge,
    next_sample,
    places_of,
    reports,
)
from integration.node.faults.policy import policy_of
from integration.node.faults.xids import Severity
from integration.node.values.health import HealthState
from integration.nvml.values import DeviceSample, GpuEvent, GpuSample, Sample, SwitchError
from shim.causes.xids import Remedy
from tests.unit.node.inventories import inventory

RULES: Final = Rules(suspects=3, window=100, patience=20, quiet=10, longest=80)
POLICY: Final = policy_of(Config(), "", "")

# One whole GPU, and one in MIG mode with two devices in one instance and one in another.
WHOLE: Final = Place("GPU-0", "GPU-0", "0000:18:00.0")
CUT: Final = Place("GPU-1", "GPU-1", "0000:2a:00.0")
PARTS: Final = (
    Place("MIG-a", "GPU-1", CUT.bus_id, 1, 0),
    Place("MIG-b", "GPU-1", CUT.bus_id, 1, 1),
    Place("MIG-c", "GPU-1", CUT.bus_id, 2, 0),
)
PLACES: Final = {place.uuid: place for place in (WHOLE, CUT, *PARTS)}
OF_CUT: Final = {"GPU-1", "MIG-a", "MIG-b", "MIG-c"}


def moment(when: float) -> Moment:
    return Moment(when, when)


def table() -> HealthTable:
    return after_inventory(HealthTable(), PLACES, {}, moment(0), RULES, load="535:7")


def xid(number: int, gpu: str = "GPU-0", when: float = 1.0, **more: object) -> GpuEvent:
    return replace(GpuEvent(when, "xid", gpu, xid=number), **more)  # type: ignore[arg-type]


def asks(action: int | None, when: float = 1.0) -> GpuEvent:
    """Build NVML's event for a recovery action."""
    return GpuEvent(when, "recovery-action", "GPU-0", action=action)


def sxid(severity: str, gpu: str = "", when: float = 1.0) -> GpuEvent:
    """Build an error of an NVSwitch; ``gpu`` is the one at its port."""
    switch = SwitchError("nvidia-nvswitch0", 20034, severity, 28)
    return GpuEvent(when, "sxid", gpu, bus_id="0000:c2:00.0", switch=switch, text="LTSSM Fault Up")


def after(known: HealthTable, event: GpuEvent) -> HealthTable:
    verdict = judge(known, event, POLICY)
    return after_event(known, event, verdict, moment(event.when), RULES)


def states(known: HealthTable) -> dict[str, HealthState]:
    return {uuid: health.state for uuid, health in reports(known).items()}


def ill(known: HealthTable) -> set[str]:
    return {uuid for uuid, state in states(known).items() if not state.is_allocatable}


def answers(when: float, **of_gpus: object) -> Sample:
    mig = tuple(DeviceSample(part.uuid) for part in PARTS)
    both = (GpuSample("GPU-0"), GpuSample("GPU-1", mig=mig))
    return Sample(when, gpus=tuple(replace(each, **of_gpus) for each in both))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "hit", "severity", "certain"),
    [
        (xid(119), {"GPU-0"}, Severity.UNHEALTHY, True),
        (xid(119, "", bus_id="0000:18:00"), {"GPU-0"}, Severity.UNHEALTHY, True),
        (xid(119, "", bus_id="00000000:18:00.0"), {"GPU-0"}, Severity.UNHEALTHY, True),
        (xid(32, "GPU-1"), OF_CUT, Severity.SUSPECT, True),
        (xid(32, "MIG-a", gpu_instance=1), {"MIG-a", "MIG-b"}, Severity.SUSPECT, True),
        (xid(32, "GPU-1", gpu_instance=1), {"MIG-a", "MIG-b"}, Severity.SUSPECT, True),
        (
            xid(32, "GPU-1", gpu_instance=1, compute_instance=1),
            {"MIG-b"}, Severity.SUSPECT, True,
        ),
        (
            xid(32, "GPU-1", gpu_instance=0xFFFFFFFF, compute_instance=0xFFFFFFFF),
            OF_CUT, Severity.SUSPECT, True,
        ),
        (xid(94, "GPU-1", gpu_instance=2), {"MIG-c"}, Severity.SUSPECT, True),
        (xid(79, "GPU-1", gpu_instance=2), OF_CUT, Severity.FATAL, True),
        (xid(119, "GPU-1", gpu_instance=2), OF_CUT, Severity.UNHEALTHY, True),
        (xid(94, "GPU-1", gpu_instance=5), OF_CUT, Severity.SUSPECT, False),
        (xid(79, "GPU-9"), {"GPU-0", *OF_CUT}, Severity.SUSPECT, False),
        (xid(31, "GPU-9"), set(), Severity.IGNORE, False),
        (xid(154), {"GPU-0"}, Severity.SUSPECT, True),
        (
            xid(154, text="GPU recovery action changed from 0x0 (None) to 0x2 "
                "(Node Reboot Required)"),
            {"GPU-0"}, Severity.FATAL, True,
        ),
        (
            xid(154, text="GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)"),
            {"GPU-0"}, Severity.FATAL, True,
        ),
        (
            xid(154, text="GPU recovery action changed from 0x0 (None) to 0x5 "
                "(Recover IMEX Domain)"),
            {"GPU-0"}, Severity.FATAL, True,
        ),
        (
            xid(154, text="GPU recovery action changed from 0x0 (None) to 0x6 (Bus Reset)"),
            {"GPU-0"}, Severity.FATAL, True,
        ),
        (
            xid(154, text="GPU recovery action changed from 0x0 (None) to 0x9 (New)"),
            {"GPU-0"}, Severity.UNHEALTHY, True,
        ),
        (xid(173), {"GPU-0"}, Severity.FATAL, True),
        (xid(174), {"GPU-0"}, Severity.SUSPECT, True),
        (xid(175), {"GPU-0"}, Severity.UNHEALTHY, True),
        (xid(176), {"GPU-0"}, Severity.SUSPECT, True),
        (
            xid(154, text="GPU recovery action changed from 0x1 (Drain P2P) to 0x0 (None)"),
            {"GPU-0"}, Severity.IGNORE, True,
        ),
        (xid(154, text="name=changed to(None), and more"), {"GPU-0"}, Severity.SUSPECT, True),
        (GpuEvent(1, "ecc-double", "GPU-0"), {"GPU-0"}, Severity.SUSPECT, True),
        (asks(2), {"GPU-0"}, Severity.FATAL, True),
        (asks(3), {"GPU-0"}, Severity.SUSPECT, True),
        (asks(99), {"GPU-0"}, Severity.UNHEALTHY, True),
        (asks(None), {"GPU-0"}, Severity.SUSPECT, True),
        (asks(0), {"GPU-0"}, Severity.IGNORE, True),
        (sxid("fatal", "GPU-0"), {"GPU-0"}, Severity.FATAL, True),
        # A GPU in MIG mode does not use NVLink.
        (sxid("fatal", "GPU-1"), set(), Severity.IGNORE, True),
        (sxid("fatal"), {"GPU-0"}, Severity.SUSPECT, False),
        (sxid("non-fatal", "GPU-0"), set(), Severity.IGNORE, True),
        (sxid(""), set(), Severity.IGNORE, True),
    ],
)  # fmt: skip
def test_what_an_event_is_of(
    event: GpuEvent,
    hit: set[str],
    severity: Severity,
    certain: bool,
) -> None:
    verdict = judge(table(), event, POLICY)
    assert (set(verdict.devices), verdict.severity, verdict.certain) == (hit, severity, certain)


DOUBLE_BIT = GpuEvent(1, "ecc-double", "GPU-0")


@pytest.mark.parametrize(
    ("disabled", "enabled", "event", "severity"),
    [
        ("xids", "", sxid("fatal", "GPU-0"), Severity.IGNORE),
        ("xids", "", sxid("fatal"), Severity.IGNORE),
        ("all", "79", sxid("fatal", "GPU-0"), Severity.IGNORE),
        ("xids", "all", sxid("fatal", "GPU-0"), Severity.FATAL),
        ("79", "", sxid("fatal", "GPU-0"), Severity.FATAL),
        ("xids", "", DOUBLE_BIT, Severity.IGNORE),
        ("48", "", DOUBLE_BIT, Severity.IGNORE),
        ("xids", "48", DOUBLE_BIT, Severity.SUSPECT),
    ],
)
def test_all_errors_ignored_are_also_those_without_an_xid(
    disabled: str, enabled: str, event: GpuEvent, severity: Severity
) -> None:
    verdict = judge(table(), event, policy_of(Config(), disabled, enabled))
    assert verdict.severity == severity


def test_an_error_of_one_instance_leaves_the_others_alone() -> None:
    known = table()
    for when in (1.0, 2.0, 3.0):
        known = after(known, xid(94, "GPU-1", when, gpu_instance=1, compute_instance=0))
    assert ill(known) == {"MIG-a"}
    assert states(known)["MIG-b"] == HealthState.HEALTHY
    assert ill(after(known, xid(79, "GPU-1"))) == OF_CUT


def test_an_error_of_a_gpu_that_nobody_knows_makes_nobody_unhealthy() -> None:
    known = table()
    for when in range(1, 9):
        known = after(known, xid(79, "GPU-9", float(when)))
    assert set(states(known).values()) == {HealthState.SUSPECT}
    known = after_sample(known, answers(30), moment(30), RULES)
    assert set(states(known).values()) == {HealthState.HEALTHY}


@pytest.mark.parametrize("numbers", [(48, 94), (94, 48)])
def test_a_double_bit_error_that_was_contained_needs_no_reset(numbers: tuple[int, int]) -> None:
    known = table()
    for when, number in enumerate(numbers, 1):
        known = after(known, xid(number, when=float(when)))
    assert ill(known) == {"GPU-0"}
    assert known.conditions["GPU-0"].need == Need.PROOF
    late = after(after(table(), xid(94, when=1)), xid(48, when=60))
    assert late.conditions["GPU-0"].need == Need.RESET
    other = after(after(table(), xid(94, "GPU-1", when=1)), xid(48, when=2))
    assert other.conditions["GPU-0"].need == Need.RESET


def test_what_the_driver_needs_no_more_is_a_reset() -> None:
    known = after(table(), xid(79))
    text = "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"
    known = after(known, xid(154, text=text))
    assert known.conditions["GPU-0"].need == Need.PROOF


def test_a_fatal_error_of_a_switch_is_the_reason_and_says_what_to_reset() -> None:
    reason = "SXid 20034 of nvidia-nvswitch0, link 28: LTSSM Fault Up"
    health = after(table(), sxid("fatal", "GPU-0")).conditions["GPU-0"]
    assert (health.state, health.need, health.reason) == (HealthState.UNHEALTHY, Need.RESET, reason)
    assert health.remedy == Remedy.RESET
    health = after(table(), sxid("fatal")).conditions["GPU-0"]
    assert (health.state, health.reason) == (HealthState.SUSPECT, f"{reason}, of an unknown GPU")
    assert health.remedy == Remedy.SWITCHES


@pytest.mark.parametrize(
    ("flag", "state", "reason"),
    [
        ("channel_repair_pending", HealthState.SUSPECT, "a memory channel is pending a repair"),
        ("tpc_repair_pending", HealthState.SUSPECT, "a processing cluster is pending a repair"),
        ("unrepairable_memory", HealthState.UNHEALTHY, "it has memory that cannot be repaired"),
    ],
)
def test_a_defect_that_nvml_names_is_the_reason(flag: str, state: HealthState, reason: str) -> None:
    known = after_sample(table(), answers(5, **{flag: True}), moment(5), RULES)
    health = known.conditions["GPU-0"]
    assert (health.state, health.reason) == (state, reason)
    assert health.remedy.startswith("reset the GPU")


def test_a_gpu_is_given_again_when_nvml_asks_for_nothing_any_more() -> None:
    known = after(table(), asks(2))
    assert known.conditions["GPU-0"].remedy == Remedy.REBOOT
    known = after_sample(known, answers(2, recovery_action=2), moment(2), RULES)
    assert ill(known) == {"GPU-0", *OF_CUT}  # `answers` covers both
    known = after(known, asks(0, 3))
    known = after_sample(known, answers(4, recovery_action=0), moment(4), RULES)
    assert states(known)["GPU-0"] == HealthState.RECOVERING
    known = after_sample(known, answers(60, recovery_action=0), moment(60), RULES)
    assert set(states(known).values()) == {HealthState.HEALTHY}


def test_an_unknown_action_names_the_catalogue_and_an_ignored_154_ignores_it() -> None:
    verdict = judge(table(), asks(99), POLICY)
    assert verdict.remedy == Remedy.CATALOGUE
    ignoring = replace(POLICY, ignored=frozenset({154}))
    assert judge(table(), asks(99), ignoring).severity == Severity.IGNORE


def test_nvml_that_hiccups_takes_nothing_away_at_once() -> None:
    silent = Sample(5, failure="it hangs")
    known = after_sample(table(), silent, moment(5), RULES)
    assert set(states(known).values()) == {HealthState.SUSPECT}
    known = after_sample(known, replace(silent, when=26), moment(26), RULES)
    assert ill(known) == set(PLACES)
    known = after_sample(known, answers(27), moment(27), RULES)
    assert set(states(known).values()) == {HealthState.RECOVERING}
    known = after_sample(known, answers(38), moment(38), RULES)
    assert set(states(known).values()) == {HealthState.HEALTHY}


@pytest.mark.parametrize(
    ("before", "now", "reset"),
    [
        ({"energy_joules": 900.0}, {"energy_joules": 3.0}, True),
        ({"energy_joules": 900.0}, {"energy_joules": 899.9999}, False),
        ({"ecc_uncorrected": 1}, {"ecc_uncorrected": 0}, True),
        ({"ecc_uncorrected": 1}, {}, False),
        ({}, {"energy_joules": 3.0}, False),
    ],
)
def test_counters_that_went_back_are_a_reset(
    before: dict[str, object],
    now: dict[str, object],
    reset: bool,
) -> None:
    known = after_sample(table(), answers(0.5, **before), moment(0.5), RULES)
    known = after_sample(after(known, xid(79)), answers(5, **now), moment(5), RULES)
    assert (states(known)["GPU-0"] == HealthState.RECOVERING) == reset


@pytest.mark.parametrize(
    ("action", "state"),
    [(None, HealthState.HEALTHY), (0, HealthState.HEALTHY), (1, HealthState.UNHEALTHY),
     (2, HealthState.UNHEALTHY), (5, HealthState.UNHEALTHY), (6, HealthState.UNHEALTHY),
     (9, HealthState.UNHEALTHY),
     (3, HealthState.HEALTHY)],  # the last one is the fault of applications
)  # fmt: skip
def test_what_nvml_says_has_to_be_done_with_a_gpu_makes_it_unhealthy(
    action: int | None, state: HealthState
) -> None:
    known = after_sample(table(), answers(5, recovery_action=action), moment(5), RULES)
    assert states(known)["GPU-0"] == state


def test_a_driver_that_was_loaded_anew_is_a_reset_and_one_that_is_gone_is_a_loss() -> None:
    known = after(after(table(), xid(79)), xid(79, "GPU-1"))
    known = after_inventory(known, None, {}, moment(2), RULES, why="no libcuda.so")
    assert ill(known) == set(PLACES)
    assert known.conditions["GPU-0"].lost == "the driver is gone: no libcuda.so"
    known = after_inventory(known, PLACES, {}, moment(3), RULES, load="550:9")
    assert ill(known) == set(PLACES)
    known = after_sample(known, answers(4), moment(4), RULES)
    assert set(states(known).values()) == {HealthState.RECOVERING}


def test_what_is_not_a_loss_of_the_gpu_itself_is_no_reset() -> None:
    fatal = after_sample(after(table(), xid(95)), answers(2), moment(2), RULES)
    files = after_inventory(fatal, None, {}, moment(3), RULES, load="535:7", why="no libcuda.so")
    files = after_inventory(files, PLACES, {}, moment(4), RULES, load="535:7")
    uncounted = after_sample(fatal, Sample(3, uncounted=("GPU-0", "GPU-1")), moment(3), RULES)
    for known in (files, uncounted):
        assert known.conditions["GPU-0"].lost
        back = after_sample(known, answers(5), moment(5), RULES)
        assert (states(back)["GPU-0"], states(back)["GPU-1"]) == (
            HealthState.UNHEALTHY, HealthState.RECOVERING,
        )  # fmt: skip
        assert back.conditions["GPU-0"].need == Need.RESET
    lost = after_inventory(files, PLACES, {"GPU-0": "GPU is lost"}, moment(6), RULES)
    assert (
        states(after_sample(lost, answers(7), moment(7), RULES))["GPU-0"] == HealthState.RECOVERING
    )


def test_a_gpu_whose_uuid_nobody_can_tell_now_is_the_one_that_was_at_its_address() -> None:
    whole = inventory()
    known = places_of(whole, {})
    silent = replace(
        whole,
        gpus=tuple(replace(gpu, uuid="") for gpu in whole.gpus),
        mig_devices=(),
        nvml_failure="it hangs",
    )
    there = places_of(silent, known)
    assert set(there) == {"GPU-0", "GPU-1"}
    after_look = after_inventory(
        after_inventory(HealthTable(), known, {}, moment(0), RULES),
        there,
        {},
        moment(1),
        RULES,
        complete=False,
    )
    assert ill(after_look) == set()
    assert not after_look.gone
    assert places_of(silent, {}) == {}


def test_an_error_that_may_be_anothers_keeps_nobody_from_recovering() -> None:
    known = after_sample(after(table(), xid(119)), answers(2), moment(2), RULES)
    known = after(known, xid(79, "GPU-9", when=3.0))
    assert states(known)["GPU-0"] == HealthState.RECOVERING


def test_an_answer_from_before_the_error_proves_nothing() -> None:
    known = after(table(), xid(119, when=5.0))
    assert (
        states(after_sample(known, answers(4), moment(6), RULES))["GPU-0"] == HealthState.UNHEALTHY
    )
    assert (
        states(after_sample(known, answers(6), moment(6), RULES))["GPU-0"] == HealthState.RECOVERING
    )


def test_a_gpu_that_nvml_does_not_count_or_cannot_open_is_lost_with_its_parts() -> None:
    one = Sample(1.0, gpus=(GpuSample("GPU-0"),), uncounted=("GPU-1",))
    assert ill(after_sample(table(), one, moment(1), RULES)) == OF_CUT
    doubted = replace(one, uncounted=())
    assert ill(after_sample(table(), doubted, moment(1), RULES)) == set()
    lost = replace(one, gpus=(GpuSample("GPU-0"), GpuSample("GPU-1", lost="GPU is lost")))
    assert ill(after_sample(table(), lost, moment(1), RULES)) == OF_CUT
    assert (
        ill(after_inventory(table(), PLACES, {"GPU-1": "GPU is lost"}, moment(1), RULES)) == OF_CUT
    )


def test_a_gpu_that_was_pulled_out_and_put_back_has_to_prove_itself() -> None:
    without = {uuid: place for uuid, place in PLACES.items() if place.gpu == "GPU-1"}
    known = after_inventory(table(), without, {}, moment(1), RULES)
    assert states(known)["GPU-0"] == HealthState.UNHEALTHY  # its holders have lost it
    known = after_inventory(known, PLACES, {}, moment(2), RULES)
    assert states(known)["GPU-0"] == HealthState.UNHEALTHY
    known = after_sample(known, answers(3), moment(3), RULES)
    assert states(known)["GPU-0"] == HealthState.RECOVERING
    known = after_inventory(known, without, {}, moment(4), RULES)
    known = after_inventory(known, without, {}, moment(100), RULES)
    assert "GPU-0" not in known.conditions  # it will not return


def test_a_mig_device_that_was_removed_is_told_of_no_more() -> None:
    without = {uuid: place for uuid, place in PLACES.items() if uuid != "MIG-a"}
    known = after_inventory(table(), without, {}, moment(1), RULES)
    assert "MIG-a" not in reports(known)
    assert ill(known) == set()
    assert ill(after_inventory(known, PLACES, {}, moment(2), RULES)) == set(), (
        "it was removed on purpose"
    )
    # Without NVML the MIG devices are unknown.
    known = after_inventory(table(), without, {}, moment(1), RULES, complete=False)
    assert states(known)["MIG-a"] == HealthState.HEALTHY


AGAIN: Final = replace(PARTS[0], uuid="MIG-again")


def without(uuid: str) -> dict[str, Place]:
    return {each: place for each, place in PLACES.items() if each != uuid}


def removed_and_made(known: HealthTable, when: float, new: Place = PARTS[0]) -> HealthTable:
    """Return the table after MIG-a was removed and another device was created."""
    known = after_inventory(known, without("MIG-a"), {}, moment(when), RULES)
    assert "MIG-a" not in reports(known)
    places = {**without("MIG-a"), new.uuid: new}
    return after_inventory(known, places, {}, moment(when + 1), RULES)


@pytest.mark.parametrize("new", [PARTS[0], AGAIN], ids=["same UUID", "other UUID"])
def test_a_mig_device_that_is_made_again_and_again_is_healthy(new: Place) -> None:
    known = table()
    for when in range(2, 20, 4):
        known = removed_and_made(known, when, new)
        assert ill(known) == set()
        known = removed_and_made(
            after_inventory(known, PLACES, {}, moment(when + 2), RULES), when + 2
        )
    assert known.places == PLACES
    assert not known.gone


@pytest.mark.parametrize("new", [PARTS[0], AGAIN], ids=["same UUID", "other UUID"])
@pytest.mark.parametrize(
    ("number", "state"),
    [(32, HealthState.SUSPECT), (94, HealthState.SUSPECT), (119, HealthState.HEALTHY)],
)
def test_an_error_of_a_mig_device_itself_stays_with_what_is_made_in_its_place(
    new: Place, number: int, state: HealthState
) -> None:
    known = after(table(), xid(number, "GPU-1", gpu_instance=1, compute_instance=0))
    if number == 119:  # it concerns the whole GPU, which recovers meanwhile
        for when in (2, 30):
            known = after_sample(known, answers(when), moment(when), RULES)
    known = removed_and_made(known, 31, new)
    assert states(known)[new.uuid] == state
    assert known.places.keys() == {*without("MIG-a"), new.uuid}


def test_errors_of_its_own_make_it_unhealthy_and_it_recovers_as_any() -> None:
    known = table()
    for when in (1.0, 2.0, 3.0):
        known = after(known, xid(32, "GPU-1", when=when, gpu_instance=2))
    gone = after_inventory(known, without("MIG-c"), {}, moment(4), RULES)
    known = after_inventory(gone, PLACES, {}, moment(5), RULES)
    assert ill(known) == {"MIG-c"}
    for when in (6, 17):
        known = after_sample(known, answers(when), moment(when), RULES)
    assert ill(known) == set()
    # Another MIG device of the GPU has nothing to do with it, and neither has a whole GPU.
    other = replace(PARTS[2], profile="2g.20gb")
    gone = replace(gone, places={**gone.places, "MIG-c": replace(PARTS[2], profile="1g.10gb")})
    for new in (other, replace(other, uuid="MIG-other")):
        assert ill(after_inventory(gone, {**PLACES, new.uuid: new}, {}, moment(5), RULES)) <= {
            "MIG-c"
        } - {new.uuid}
    assert "MIG-c" not in after_inventory(gone, without("MIG-c"), {}, moment(200), RULES).conditions


def test_the_parts_of_a_gpu_that_was_lost_have_to_prove_themselves() -> None:
    lost = {"GPU-1": "GPU is lost"}
    gpus = {"GPU-0": WHOLE, "GPU-1": CUT}
    known = after_inventory(table(), gpus, lost, moment(1), RULES)
    assert "MIG-a" not in reports(known)
    known = after_inventory(known, PLACES, {}, moment(2), RULES)
    assert ill(known) == OF_CUT
    for when in (3, 14):
        known = after_sample(known, answers(when), moment(when), RULES)
    assert ill(known) == set()
    # A sample may show it before an inventory does.
    one = Sample(15.0, gpus=(GpuSample("GPU-0"), GpuSample("GPU-1", lost="GPU is lost")))
    known = after_inventory(
        after_sample(known, one, moment(15), RULES), gpus, {}, moment(16), RULES
    )
    assert ill(after_inventory(known, PLACES, {}, moment(17), RULES)) == OF_CUT


def test_a_reset_of_its_gpu_counts_for_a_part_that_is_not_there() -> None:
    known = after_sample(table(), answers(1, energy_joules=50.0), moment(1), RULES)
    own = replace(known.conditions["MIG-a"], state=HealthState.UNHEALTHY, need=Need.RESET, own=True)
    known = replace(known, conditions={**known.conditions, "MIG-a": own})
    known = after_inventory(known, without("MIG-a"), {}, moment(2), RULES)
    known = after_sample(known, answers(3, energy_joules=1.0), moment(3), RULES)
    known = after_inventory(known, PLACES, {}, moment(4), RULES)
    assert known.conditions["MIG-a"].need == Need.PROOF
    known = after_clear(known, ["MIG-a"], moment(5), RULES)
    assert ill(removed_and_made(known, 6)) == set(), "a person has put it back"


def test_a_mig_device_that_is_made_of_an_unhealthy_gpu_is_unhealthy() -> None:
    known = after(
        after_inventory(HealthTable(), {"GPU-1": CUT}, {}, moment(0), RULES), xid(79, "GPU-1")
    )
    known = after_inventory(known, {"GPU-1": CUT, "MIG-a": PARTS[0]}, {}, moment(2), RULES)
    assert ill(known) == {"GPU-1", "MIG-a"}


def test_events_that_cannot_be_had_make_suspect_as_long_as_that_lasts() -> None:
    known = after_watch(table(), {"GPU-0": "not supported"}, moment(1), RULES)
    assert states(known) == {
        **dict.fromkeys(PLACES, HealthState.HEALTHY),
        "GPU-0": HealthState.SUSPECT,
    }
    known = after_watch(known, {"": "NVML hangs"}, moment(2), RULES)
    assert set(states(known).values()) == {HealthState.SUSPECT}
    known = after_sample(after_watch(known, {}, moment(3), RULES), answers(20), moment(20), RULES)
    assert set(states(known).values()) == {HealthState.HEALTHY}


def test_a_person_puts_a_gpu_back_and_its_parts() -> None:
    known = after_clear(after(table(), xid(79, "GPU-1")), ["GPU-1", "GPU-9"], moment(3), RULES)
    assert ill(known) == set()
    assert reports(known)["MIG-a"].reason == "returned to service by hand"
    assert ill(after_clear(after(table(), xid(79, "GPU-1")), ["MIG-a"], moment(3), RULES)) == {
        "GPU-1", "MIG-b", "MIG-c",
    }  # fmt: skip


def test_nvml_is_asked_when_something_can_become_of_it() -> None:
    assert next_sample(table(), 0, RULES, usual=60) == float("inf")
    known = after(table(), xid(79))
    assert next_sample(known, 1, RULES, usual=60) == 61
    known = after_sample(after(table(), xid(119)), answers(2), moment(2), RULES)
    assert next_sample(known, 2, RULES, usual=60) == 12
    assert next_sample(after(table(), xid(32)), 2, RULES, usual=600) == 101
    assert next_sample(after(table(), xid(32)), 102, RULES, usual=60) == 162
    silent = after_sample(table(), Sample(5, failure="it hangs"), moment(5), RULES)
    assert next_sample(silent, 5, RULES, usual=60) == 10  # a hiccup has passed by then
    silent = after_sample(silent, Sample(26, failure="it hangs"), moment(26), RULES)
    assert next_sample(silent, 26, RULES, usual=60) == 86


uuids = st.sampled_from([*PLACES, "GPU-9", ""])
events = st.builds(
    lambda number, gpu, kind, instance, part: GpuEvent(
        0, kind, gpu, xid=number, gpu_instance=instance, compute_instance=part
    ),
    st.sampled_from([13, 32, 48, 79, 94, 119, 154, 999]),
    uuids,
    st.sampled_from(["xid", "xid", "xid", "ecc-double"]),
    st.sampled_from([None, 1, 2, 7, 0xFFFFFFFF]),
    st.sampled_from([None, 0, 1]),
)
samples = st.one_of(
    st.just(Sample(0, failure="hangs")),
    st.builds(
        lambda lost, joules: answers(0, lost=lost, energy_joules=joules),
        st.sampled_from(["", "", "gone"]),
        st.sampled_from([None, 5.0, 50.0]),
    ),
    st.just(Sample(0)),
    st.just(Sample(0, uncounted=("GPU-0",))),
)
looks = st.one_of(
    st.none(),
    st.sets(st.sampled_from(sorted(PLACES))).map(
        lambda some: {uuid: place for uuid, place in PLACES.items() if place.gpu in some}
    ),
    st.sampled_from([part.uuid for part in PARTS]).map(without),
)


@given(st.lists(st.one_of(events, samples, looks, st.just("clear")), max_size=25))
def test_whatever_happens_what_is_lost_is_not_given_and_a_fatal_error_takes_all_of_its_gpu(
    history: list[object],
) -> None:
    known = table()
    for number, happened in enumerate(history, 1):
        now = moment(7.0 * number)
        if isinstance(happened, GpuEvent):
            event = replace(happened, when=now.boot)
            verdict = judge(known, event, POLICY)
            assert set(verdict.devices) <= set(known.places) - known.gone
            known = after_event(known, event, verdict, now, RULES)
            if verdict.severity == Severity.FATAL:
                assert set(known.of_gpu(verdict.gpu)) <= ill(known)
        elif isinstance(happened, Sample):
            known = after_sample(known, replace(happened, when=now.boot), now, RULES)
        elif happened == "clear":
            known = after_clear(known, list(known.places), now, RULES)
        else:
            known = after_inventory(known, happened, {}, now, RULES, load="535:7")  # type: ignore[arg-type]
        assert known.places.keys() == known.conditions.keys()
        for uuid, condition in known.conditions.items():
            assert not (condition.lost and condition.state.is_allocatable)
            if uuid in known.gone:
                assert condition.lost or condition.own
            assert not (condition.own and condition.state == HealthState.HEALTHY)
        assert next_sample(known, now.boot, RULES, usual=60) > now.boot
