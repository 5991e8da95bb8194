"""Faults of a container: their file, the table of Xids, and the message for users."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.causes.exit_message import LONGEST, exit_message, relevant
from shim.causes.record import (
    MOST,
    Fault,
    Whose,
    by_weight,
    forget_causes,
    path_of,
    read_causes,
    read_pod,
    write_causes,
)
from shim.causes.xids import (
    XIDS,
    Action,
    Remedy,
    about,
    recovery_action,
    recovery_asked,
    with_recovery,
)
from shim.errors import BundleUnusable, InvalidIdentifier
from tests.harness.raising import raises

GPU = "GPU-1b7a0c55-0000-4000-8000-00000000000a"
EXIT = 1_795_677_165.8  # 07:12:45.8 UTC
LOST = Fault(
    EXIT - 1.3, "xid", 79, about(79).meaning, GPU, pid=4711, whose=Whose.DEVICE, sure=True,
    action=Action.REBOOT,
)  # fmt: skip
WILD = Fault(
    EXIT - 0.2, "xid", 31, about(31).meaning, GPU, pid=4711, whose=Whose.APPLICATION, sure=True
)


def put(tmp_path: Path, content: bytes) -> str:
    path = Path(path_of(str(tmp_path), "k8s.io", "c1"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(tmp_path)


# -- the file ----------------------------------------------------------------------------------


def test_what_was_written_is_read(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    write_causes(state, "k8s.io", "c1", [WILD, LOST], pod={"namespace": "a", "name": "b"})
    assert read_causes(state, "k8s.io", "c1") == (LOST, WILD), "the oldest first"
    assert read_pod(state, "k8s.io", "c1") == {"namespace": "a", "name": "b"}
    assert stat.S_IMODE(os.stat(path_of(state, "k8s.io", "c1")).st_mode) == 0o600
    for directory in ("causes", "causes/k8s.io"):
        assert stat.S_IMODE(os.stat(f"{state}/{directory}").st_mode) == 0o700
    assert os.listdir(f"{state}/causes/k8s.io") == ["c1.json"]
    forget_causes(state, "k8s.io", "c1")
    forget_causes(state, "k8s.io", "c1")
    assert read_causes(state, "k8s.io", "c1") == ()
    assert read_pod(state, "k8s.io", "c1") == {}


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".x", "a\n", "a" * 77, "ä"])
def test_a_name_that_is_no_identifier_is_no_path(tmp_path: Path, name: str) -> None:
    for call in (
        lambda: write_causes(str(tmp_path), name, "c1", [LOST]),
        lambda: write_causes(str(tmp_path), "k8s.io", name, [LOST]),
        lambda: read_causes(str(tmp_path), name, "c1"),
        lambda: forget_causes(str(tmp_path), "k8s.io", name),
    ):
        with raises(InvalidIdentifier):
            call()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no JSON"),
        (b"[]", "not an object"),
        (b"[" * 9000, "no JSON"),
        (b'{"version": 2, "faults": []}', "not of version 1"),
        (b'{"version": 1, "faults": [' + b" " * (16 << 10) + b"]}", "more than 16384 bytes"),
        (b"\xff\xfe", "no JSON"),
    ],
)
def test_a_malformed_file_has_no_faults_and_a_word_for_the_log(
    tmp_path: Path, content: bytes, why: str
) -> None:
    words: list[str] = []
    assert read_causes(put(tmp_path, content), "k8s.io", "c1", warn=words.append) == ()
    assert len(words) == 1
    assert why in words[0]


def test_a_link_or_a_fifo_in_its_place_is_not_read(tmp_path: Path) -> None:
    state = put(tmp_path, b"")
    path = path_of(state, "k8s.io", "c1")
    for made in ("link", "fifo"):
        os.unlink(path)
        if made == "link":
            os.symlink("/etc/passwd", path)
        else:
            os.mkfifo(path)
        words: list[str] = []
        assert read_causes(state, "k8s.io", "c1", warn=words.append) == ()
        assert len(words) == 1


@pytest.mark.parametrize(
    "row",
    [
        None, 7, {}, {"kind": "xid"}, {"at": 1.0}, {"at": "1", "kind": "xid"},
        {"at": True, "kind": "xid"}, {"at": 1e400, "kind": "xid"}, {"at": 1.0, "kind": ""},
    ],
)  # fmt: skip
def test_a_fault_without_time_and_kind_is_none(tmp_path: Path, row: object) -> None:
    rows = json.dumps({"version": 1, "faults": [row, {"at": 5, "kind": "mps"}]}).encode()
    assert read_causes(put(tmp_path, rows), "k8s.io", "c1") == (Fault(5, "mps"),)


def test_what_is_not_known_is_ignored(tmp_path: Path) -> None:
    row = {
        "at": 5.5, "kind": "new", "code": -1, "pid": "x", "sure": 1, "whose": "moon", "name": [],
        "other": 1, "gpu": "a\nb\x1b[31m",
    }  # fmt: skip
    document = {"version": 1, "faults": [row], "more": {}}
    [fault] = read_causes(put(tmp_path, json.dumps(document).encode()), "k8s.io", "c1")
    assert fault == Fault(5.5, "new", gpu="a b?[31m")


def test_of_a_thousand_faults_those_are_kept_that_say_most(tmp_path: Path) -> None:
    storm = [replace(WILD, at=EXIT + n) for n in range(1000)]
    write_causes(str(tmp_path), "k8s.io", "c1", [LOST, *storm])
    kept = read_causes(str(tmp_path), "k8s.io", "c1")
    assert len(kept) == MOST
    assert kept == (LOST, *storm[-MOST + 1 :])


def test_a_file_stays_small_whatever_its_texts(tmp_path: Path) -> None:
    long = "\U0001f4a5" * 5000
    fault = Fault(1.0, long, name=long, gpu=long, mig=long, action=long, source=long)
    write_causes(str(tmp_path), "k8s.io", "c1", [fault] * 1000, pod={"name": long})
    assert os.stat(path_of(str(tmp_path), "k8s.io", "c1")).st_size <= 16 << 10
    assert len(read_causes(str(tmp_path), "k8s.io", "c1")) == MOST


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "causes").write_text("no directory")
    with pytest.raises(BundleUnusable, match=r"cannot write .*c1\.json"):
        write_causes(str(tmp_path), "k8s.io", "c1", [LOST])


@given(st.binary(max_size=300))
def test_every_content_is_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    state = put(tmp_path_factory.mktemp("state"), content)
    assert isinstance(read_causes(state, "k8s.io", "c1"), tuple)


# -- the table ---------------------------------------------------------------------------------


def test_each_number_says_whose_it_is_and_what_to_do() -> None:
    for number, xid in XIDS.items():
        assert xid.number == number
        assert xid.name
        assert xid.meaning
        if xid.whose == Whose.APPLICATION:
            assert xid.action == Action.NOTHING
        elif xid.whose == Whose.DEVICE:
            assert xid.action != Action.NOTHING
    assert [n for n in (13, 31, 43) if XIDS[n].whose != Whose.APPLICATION] == []
    assert [n for n in (48, 79, 94, 95, 119, 140) if XIDS[n].whose != Whose.DEVICE] == []
    assert not XIDS[45].ends
    assert about(4711).whose == Whose.UNCLEAR
    # Actions that the driver itself requests, or that an NVSwitch error needs.
    asked = {Remedy.IMEX, Remedy.BUS_RESET, Remedy.CATALOGUE, Remedy.SWITCHES}
    assert {Remedy(xid.remedy) for xid in XIDS.values()} == set(Remedy) - asked


@pytest.mark.parametrize(
    ("number", "action", "expected"),
    [
        (79, None, (Whose.DEVICE, Action.REBOOT)),
        (31, None, (Whose.APPLICATION, Action.NOTHING)),
        (31, Action.RESET, (Whose.DEVICE, Action.RESET)),
        (48, Action.NOTHING, (Whose.DEVICE, Action.NOTHING)),
        (13, Action.DRAIN, (Whose.APPLICATION, Action.DRAIN)),
        (79, recovery_action(6), (Whose.DEVICE, Action.BUS_RESET)),
    ],
)
def test_a_driver_that_says_what_it_needs_overrides_the_table(
    number: int, action: Action | None, expected: tuple[Whose, Action]
) -> None:
    assert with_recovery(about(number), action) == expected


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
         Action.REBOOT),
        ("GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None).",
         Action.NOTHING),
        # Drivers 595.84 and 610 name the same numbers in other words.
        ("GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", Action.REBOOT),
        ("GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)", Action.IMEX),
        ("GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", Action.RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x6 (GPU Reset Bus)", Action.BUS_RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x1f (Prayer)", Action.CATALOGUE),
        ("GPU recovery action changed from 0x2 (OS Reboot) to 0x2", None),
        ("GPU recovery action changed from None to OS Reboot", None),
        ("to 0x0 (None)", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_number_in_the_text_of_an_xid_154_decides(text: str, action: Action | None) -> None:
    assert recovery_asked(text) == action


# -- the line ----------------------------------------------------------------------------------


def test_a_fault_of_the_device() -> None:
    assert exit_message([LOST], EXIT, "gpu-17") == (
        "GPU failure: Xid 79 (GPU has fallen off the bus) on GPU-1b7a… at 07:12:44, 1.3 s before "
        "exit. Not the application's fault. Node gpu-17 needs a reboot."
    )


def test_a_fault_of_the_application() -> None:
    assert exit_message([WILD], EXIT, "gpu-17") == (
        "GPU error: Xid 31 (memory page fault) by this process: an illegal address in a kernel. "
        "Likely the application."
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (replace(LOST, at=EXIT + 0.4, action="", sure=False),
         ("GPU failure: Xid 79 (GPU has fallen off the bus) on GPU-1b7a… at 07:12:46, 0.4 s after "
         "exit. Probably not the application's fault.")),
        (replace(LOST, at=EXIT - 600, gpu="0000:3b:00.0", name="", action="call Jensen"),
         ("GPU failure: Xid 79 on 0000:3b:00.0 at 07:02:45, 10 min before exit. Not the "
         "application's fault. To do: call Jensen.")),
        (replace(WILD, whose=Whose.NEIGHBOUR),
         ("GPU error: Xid 31 (memory page fault) by another process on GPU-1b7a… at 07:12:45, 0.2 "
         "s before exit. Not this container's fault.")),
        (Fault(EXIT - 1, "driver-lost", name="the NVIDIA driver is gone", whose=Whose.HOST,
               sure=True, action=Action.REBOOT),
         ("Node failure: NVIDIA driver is gone at 07:12:44, 1.0 s before exit. Not the "
         "application's fault. The node needs a reboot.")),
        (Fault(EXIT - 1, "memory-limit", name="more GPU memory than its limit", gpu=GPU,
               whose=Whose.APPLICATION, sure=True),
         "GPU error: more GPU memory than its limit by this container. Likely the application."),
        (Fault(EXIT - 1, "xid", 109, "context switch timeout", GPU, mig=f"MIG-{GPU[4:]}"),
         ("GPU error: Xid 109 (context switch timeout) on MIG-1b7a… at 07:12:44, 1.0 s before exit."
         " It is not known whose fault that is.")),
    ],
)  # fmt: skip
def test_other_faults(fault: Fault, expected: str) -> None:
    assert exit_message([fault], EXIT) == expected


def test_the_one_that_says_most_is_told_and_the_others_are_counted() -> None:
    host = Fault(EXIT - 1, "host-memory", whose=Whose.HOST)
    told = exit_message([WILD, host, LOST], EXIT, "gpu-17", original=134)
    assert told.startswith("GPU failure: Xid 79 ")
    assert "1.3 s before exit, and 2 more. Not" in told
    assert told.endswith("Node gpu-17 needs a reboot. The exit code was 134.")
    assert exit_message([], EXIT) == ""
    nearer = replace(LOST, at=EXIT - 0.1, code=119)
    later = replace(LOST, at=EXIT + 0.1, code=120)
    assert by_weight([LOST, later, nearer], EXIT) == [nearer, LOST, later]


def test_what_was_long_before_or_of_another_run_is_no_cause() -> None:
    near, old, late = LOST, replace(LOST, at=EXIT - 1801), replace(LOST, at=EXIT + 6)
    assert relevant([old, near, late], EXIT) == [near]
    assert relevant([old, near, late], EXIT, start=EXIT - 0.2) == []


def test_a_neighbour_that_need_not_have_reached_the_container_counts_for_moments() -> None:
    doubtful = replace(WILD, whose=Whose.NEIGHBOUR, sure=False, at=EXIT - 5)
    old = replace(doubtful, at=EXIT - 11)
    assert relevant([doubtful, old], EXIT) == [doubtful]
    sure = replace(doubtful, sure=True, at=EXIT - 600)  # as by an MPS server
    assert relevant([sure], EXIT) == [sure]
    # The container's own fault explains more, and a certain fault more than an uncertain one.
    own, likely = replace(WILD, at=EXIT - 60), replace(WILD, at=EXIT - 1, sure=False)
    assert relevant([doubtful, likely, own], EXIT) == [own, likely, doubtful]
    assert relevant([own, sure], EXIT) == [sure, own]
    assert exit_message([doubtful], EXIT).endswith(
        "That may have nothing to do with this container."
    )


def test_a_neighbour_is_not_named() -> None:
    told = exit_message([replace(WILD, whose=Whose.NEIGHBOUR, pid=987654, source="agent")], EXIT)
    assert "987654" not in told


@given(
    st.text(max_size=500), st.text(max_size=500), st.text(max_size=500), st.text(max_size=300),
    st.sampled_from(Whose), st.floats(0, 1 << 40),
)  # fmt: skip
def test_every_fault_is_one_short_printable_line(
    name: str, gpu: str, action: str, node: str, whose: Whose, at: float
) -> None:
    fault = Fault(at, "xid", 48, name, gpu, whose=whose, action=action)
    told = exit_message([fault], EXIT, node, original=1)
    assert told.isprintable()
    assert 0 < len(told.encode()) <= LONGEST
