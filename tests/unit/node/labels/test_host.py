"""Reading sysfs and NVML for labels."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from hooks.config import Config
from integration.node.services.labels.host import HostFacts, look_at_host

BUS: Final = "0000:17:00.0"
# The second of two capabilities is vendor-specific.
SPACE: Final = bytearray(256)
SPACE[0x34] = 0x40
SPACE[0x40:0x42] = 1, 0x60
SPACE[0x60:0x65] = 9, 0, 27, *b"VF"


def device(
    sys: Path,
    bus: str = BUS,
    space: bytes = bytes(256),
    vendor: str = "0x10de",
    kind: str = "0x030200",
) -> None:
    place = sys / "bus/pci/devices" / bus
    place.mkdir(parents=True)
    for name, text in {"vendor": vendor, "class": kind}.items():
        (place / name).write_text(f"{text}\n")
    (place / "config").write_bytes(space)


def look(sys: Path, machine_file: str = "") -> HostFacts:
    return look_at_host(Config(sys=str(sys)), machine_file)


def test_nothing_is_known_without_sysfs(tmp_path: Path) -> None:
    assert look(tmp_path / "none") == HostFacts()


def test_the_machine_is_that_of_sysfs_or_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "class/dmi/id").mkdir(parents=True)
    (tmp_path / "class/dmi/id/product_name").write_text("PowerEdge\n")
    (tmp_path / "machine").write_text("mine\n")
    assert look(tmp_path).machine == "PowerEdge"
    assert look(tmp_path, str(tmp_path / "machine")).machine == "mine"


def test_display_controllers_of_nvidia_are_gpus(tmp_path: Path) -> None:
    device(tmp_path)
    device(tmp_path, "0000:18:00.0", vendor="0x8086")
    device(tmp_path, "0000:19:00.0", kind="0x068000")
    assert look(tmp_path).classes == {BUS: "0x030200"}


@pytest.mark.parametrize(
    ("space", "vgpu"),
    [
        (bytes(256), False), (bytes(SPACE), True), (bytes(SPACE[:64]), None),
        (bytes(SPACE).replace(b"VF", b"XX"), False),
        (bytes(SPACE).replace(b"\x01\x60", b"\x01\x40"), False),
        (b"\xff" * 256, False),
    ],
    ids=["none", "vgpu", "unprivileged", "another", "a ring", "nonsense"],
)  # fmt: skip
def test_a_vgpu_is_known_by_its_capability(tmp_path: Path, space: bytes, vgpu: bool | None) -> None:
    device(tmp_path, space=space)
    assert look(tmp_path).vgpu is vgpu


def test_one_vgpu_is_enough(tmp_path: Path) -> None:
    device(tmp_path, space=bytes(64))
    device(tmp_path, "0000:18:00.0", space=bytes(SPACE))
    assert look(tmp_path).vgpu is True
