"""A frame of ``nvshim top``: its content, order and layout."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.node.gpus import Gpu, MigDevice
from integration import exits
from integration.cli.top import _fitting, _hidden_typing, _render
from integration.containers.bundles import Container, Pod
from integration.inspection.top import Sort, UsageSnapshot, frame_of, lines_of
from integration.node.holders.values import DeviceUse, Holding
from integration.nvml.values import DeviceSample, GpuSample, Sample
from tests.harness.nvshim import nvshim
from tests.unit.node.inventories import node_with

if TYPE_CHECKING:
    from pathlib import Path


NODE: Final = node_with(
    Gpu(0, 0, "GPU-a", "0000:01:00.0", "A100"),
    Gpu(1, 1, "GPU-b", "0000:02:00.0", "A100"),
    mig=(MigDevice(1, 0, "MIG-1", 1, 0, "1g.10gb"),),
)


def holding(name: str, *devices: str, stale: str = "") -> Holding:
    container = Container(
        name, "k8s.io", f"/b/{name}", Pod("team", name), "main", name, sandbox=False, pid=3
    )
    return Holding(container, devices, stale=stale)


USES: Final = (
    DeviceUse(holding("small", "GPU-a"), "GPU-a", (7,), 10 << 20, 90, 1, 2, 3, 5.0),
    DeviceUse(holding("big", "GPU-a", stale="old"), "GPU-a", (8, 9, 10, 11), 3 << 30, 5, 1, 0, 0,
              2500.0),
    DeviceUse(None, "GPU-a", (99,), 9 << 30),
    DeviceUse(holding("part", "MIG-1"), "MIG-1"),
    DeviceUse(holding("gone", "GPU-gone"), "GPU-gone"),
    DeviceUse(holding("taken"), "GPU-b", (12,), 1),
)  # fmt: skip
MOMENT: Final = UsageSnapshot(
    1_700_000_000.0,
    Sample(
        5.0,
        driver="550",
        gpus=(
            GpuSample("GPU-a", 80 << 30, 12 << 30, gpu_percent=95, power_watts=300.4),
            GpuSample("GPU-b", lost="fell off the bus", mig=(DeviceSample("MIG-1", 10, 2),)),
        ),
    ),
    USES,
    names={7: "python", 8: "a\x1b[2J"},
    inventory=NODE,
    health={"GPU-a": "healthy", "MIG-1": "suspect"},
    notes=("a note",),
)


def test_devices_are_in_order_and_each_has_its_containers() -> None:
    frame = frame_of(MOMENT)
    assert json.loads(json.dumps(frame)) == frame
    assert [(d["uuid"], d["index"], d["kind"], d["health"]) for d in frame["devices"]] == [
        ("GPU-a", "0", "gpu", "healthy"),
        ("GPU-b", "1", "gpu", None),
        ("MIG-1", "1:0", "mig", "suspect"),
        ("GPU-gone", None, "gpu", None),
    ]
    assert frame["devices"][1]["lost"] == "fell off the bus"
    assert frame["devices"][2]["memory_used_bytes"] == 2
    assert frame["notes"] == ["a note", "GPU-b: fell off the bus"]
    assert len({tuple(device) for device in frame["devices"]}) == 1


def test_gpus_without_a_uuid_are_told_apart_by_their_addresses() -> None:
    node = node_with(Gpu(0, 0, "", "0000:01:00.0", "A"), Gpu(1, 1, "", "0000:02:00.0", "B"))
    uses = (DeviceUse(holding("one", "0000:02:00.0"), "0000:02:00.0"),)
    moment = UsageSnapshot(1.0, Sample(1.0, failure="hangs"), uses, inventory=node)
    devices = frame_of(moment)["devices"]
    assert [(d["index"], d["name"], len(d["containers"])) for d in devices] == [
        ("0", "A", 0), ("1", "B", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sort", "first"),
    [(Sort.MEMORY, "big"), (Sort.SM, "small"), (Sort.ENERGY, "big"), (Sort.NAME, "big")],
)
def test_containers_are_sorted_and_what_is_of_none_comes_last(sort: Sort, first: str) -> None:
    uses = frame_of(MOMENT, sort)["devices"][0]["containers"]
    assert uses[0]["container"]["id"] == first
    assert uses[-1]["container"] is None


def test_lines_for_people() -> None:
    lines = lines_of(frame_of(MOMENT))
    assert [line["what"] for line in lines] == [
        "0 A100", "  team/big/main", "  team/small/main", "  (no container)",
        "1 A100", "  team/taken/main", "1:0 A100 MIG 1g.10gb", "  team/part/main", "GPU-gone",
        "  team/gone/main",
    ]  # fmt: skip
    device, big, small, *_ = lines
    assert (device["memory"], device["power"], device["temp"]) == ("12.0 GiB / 80.0 GiB", "300 W",
                                                                   "-")  # fmt: skip
    assert (big["memory"], big["power"], big["state"]) == ("3.0 GiB", "2.5 kJ", "stale")
    assert big["processes"] == "8 a\x1b[2J, 9, 10 and 1 more"
    assert (small["sm"], small["power"]) == ("90%", "5 J")
    states = {line["what"].strip(): line["state"] for line in lines}
    assert states["1 A100"] == "lost"
    assert states["team/taken/main"] == "not given"


def shown(width: int, height: int) -> list[str]:
    from rich.console import Console  # noqa: PLC0415 - as the command does

    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as captured:
        console.print(_render(frame_of(MOMENT), width, height))
    return captured.get().splitlines()


def test_a_picture_fits_its_screen_and_is_escaped() -> None:
    wide = shown(200, 50)
    assert "a\\x1b[2J" in "\n".join(wide)
    assert "\x1b[2J" not in "\n".join(wide)
    assert "PROCESSES" in wide[3]
    for width, height in ((200, 5), (60, 8), (20, 24), (3, 3), (1, 1)):
        lines = shown(width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= max(height, 5)
    assert shown(60, 8)[-1].rstrip().endswith("more lines")


def test_columns_are_left_out_whole() -> None:
    lines: list[dict[str, Any]] = lines_of(frame_of(MOMENT))
    before: set[str] = set()
    for width in range(1, 160):
        keys = {str(column.source) for column in _fitting(lines, width)}
        assert before <= keys
        before = keys
    assert _fitting(lines, 1)[0].source == "what"
    assert len(before) == 10


def test_the_terminal_is_as_it_was_and_nothing_stops_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master, slave = os.openpty()
    with open(slave, encoding="utf-8") as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        before = termios.tcgetattr(slave)
        with _hidden_typing():
            assert termios.tcgetattr(slave)[6][termios.VSUSP] == b"\0"
        assert termios.tcgetattr(slave) == before
    os.close(master)


@pytest.mark.parametrize("interval", ["0.2", "3600"])
def test_who_reads_no_more_is_no_error_and_ends_it_at_once(tmp_path: Path, interval: str) -> None:
    argv = ["top", "-o", "json", "--interval", interval, "--containerd-state", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "integration.cli", *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stderr
        assert json.loads(process.stdout.readline())["devices"] is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == exits.BROKEN_PIPE


@pytest.mark.parametrize("form", ["table", "json"])
def test_one_frame_without_a_driver_fails_as_a_list_does(tmp_path: Path, form: str) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[node]\ndriver-root = "{tmp_path}"\n')
    where = ("--config", str(config), "--containerd-state", str(tmp_path), "-o", form)
    listed = nvshim("list", *where, check=False)
    seen = nvshim("top", "--once", *where, check=False)
    assert (listed.code, seen.code) == (exits.FAILED, exits.FAILED)
    told = seen.stderr if form == "table" else "\n".join(seen.document["notes"])
    assert told.count("E0102") == 1
