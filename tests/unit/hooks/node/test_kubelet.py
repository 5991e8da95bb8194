"""The kubelet's files count only if no one but root could have written them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import Config
from hooks.engine import judge, read_request
from hooks.node import kubelet
from hooks.node.kubelet import kubelet_root, read_kubelet_record
from hooks.requests.kubelet_record import CHECKPOINT, CLAIMS
from hooks.requests.policy import Container
from hooks.words import GpuUuid
from tests.unit.hooks.requests.test_kubelet_record import (
    FIRST,
    INIT_POD,
    RECORDED,
    SECOND,
    recorded,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPECS: Final = RECORDED.parent / "specs"
POD: Final = Container(kubernetes=True, pod_uid=INIT_POD, name="main")
CLAIMING: Final = replace(POD, pod_uid="3aebbfd5-fd51-4658-b607-555b7b05fbb0")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a kubelet's directory with the files of a real one."""
    root = tmp_path / "kubelet"
    (root / "device-plugins").mkdir(parents=True, mode=0o750)
    (root / CHECKPOINT).write_bytes(recorded("checkpoint-init-container"))
    (root / CLAIMS).write_bytes(recorded("claims-shared"))
    for name in (CHECKPOINT, CLAIMS):
        (root / name).chmod(0o600)
    return root


def test_records_below_the_configured_root_are_read(root: Path) -> None:
    config = Config(kubelet_root=str(root))
    assert read_kubelet_record(POD, config).devices == (GpuUuid(SECOND),)
    assert len(read_kubelet_record(CLAIMING, config).cdi_devices) == 1
    unknown = read_kubelet_record(replace(POD, pod_uid=""), config)
    assert not unknown.gave_anything
    assert "which pod" in unknown.found


def test_root_may_be_a_link_as_disks_are_laid_out(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert read_kubelet_record(POD, Config(kubelet_root=f"{tmp_path}/link")).gave_anything


@pytest.mark.parametrize("name", kubelet.ROOTS)
def test_root_is_found_where_kubelets_have_it(root: Path, tmp_path: Path, name: str) -> None:
    config = Config(host_root=f"{tmp_path}/host")
    nowhere = read_kubelet_record(POD, config)
    assert not nowhere.gave_anything
    assert f"{tmp_path}/host/var/lib/kubelet/{CHECKPOINT}: no such file" in nowhere.found
    place = tmp_path / f"host{name}"
    place.parent.mkdir(parents=True)
    root.rename(place)
    assert kubelet_root(config) == str(place)
    assert read_kubelet_record(POD, config).gave_anything


def _link(root: Path) -> None:
    (root / CHECKPOINT).rename(root / "elsewhere")
    (root / CHECKPOINT).symlink_to("../elsewhere")


def _link_directory(root: Path) -> None:
    (root / "device-plugins").rename(root / "elsewhere")
    (root / "device-plugins").symlink_to("elsewhere")


def _fifo(root: Path) -> None:
    (root / CHECKPOINT).unlink()
    os.mkfifo(root / CHECKPOINT, 0o600)


def _directory(root: Path) -> None:
    (root / CHECKPOINT).unlink()
    (root / CHECKPOINT).mkdir(mode=0o700)


def _long(root: Path) -> None:
    os.truncate(root / CHECKPOINT, kubelet.LARGEST + 1)


DISTRUSTED: dict[str, Callable[[Path], Any]] = {
    "a link": _link,
    "a directory that is a link": _link_directory,
    "a fifo": _fifo,
    "a file that is too long": _long,
    "others write the file": lambda root: (root / CHECKPOINT).chmod(0o602),
    "a group writes the file": lambda root: (root / CHECKPOINT).chmod(0o660),
    "others write the directory": lambda root: (root / "device-plugins").chmod(0o757),
    "others write the root": lambda root: root.chmod(0o777),
    "a directory": _directory,
}  # fmt: skip


@pytest.mark.parametrize("change", DISTRUSTED.values(), ids=DISTRUSTED)
def test_file_that_another_could_have_written_does_not_count(
    root: Path, change: Callable[[Path], Any]
) -> None:
    change(root)
    record = read_kubelet_record(POD, Config(kubelet_root=str(root)))
    assert not record.gave_anything
    assert CHECKPOINT in record.found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("name", [CHECKPOINT, "device-plugins", "."])
def test_what_another_user_owns_does_not_count(root: Path, name: str) -> None:
    os.chown(root / name, 1000, 0)
    assert not read_kubelet_record(POD, Config(kubelet_root=str(root))).gave_anything


def test_record_that_is_not_there_yet_is_looked_for_once_more(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet replaces the file by a rename, so it may appear between two reads."""
    os.rename(root / CHECKPOINT, root / "new")
    (root / CHECKPOINT).write_bytes(b"")
    opened: list[str] = []
    real = os.open

    def rename_after_the_first(path: Any, *args: Any, **more: Any) -> int:
        fd = real(path, *args, **more)
        if path == os.path.basename(CHECKPOINT):
            opened.append(path)
            if len(opened) == 1:
                os.rename(root / "new", root / CHECKPOINT)
        return fd

    monkeypatch.setattr(os, "open", rename_after_the_first)
    record = read_kubelet_record(POD, Config(kubelet_root=str(root)))
    assert record.devices == (GpuUuid(SECOND),)
    assert GpuUuid(FIRST) not in record.devices


@pytest.mark.parametrize(
    ("wish", "given"), [(FIRST, [FIRST]), ("all", [FIRST]), (SECOND, []), (f"{FIRST},{SECOND}", [])]
)
def test_pod_of_a_real_node_gets_the_gpu_of_its_own_record_and_no_other(
    root: Path, wish: str, given: list[str]
) -> None:
    """The spec is from containerd 1.7.24, with the kubelet's checkpoint of that moment."""
    (root / CHECKPOINT).write_bytes(recorded("checkpoint-envvar"))
    spec = json.loads((SPECS / "containerd-1.7.24/nvidia/gpu-env.main.json").read_text())["spec"]
    spec["process"]["env"].append(f"NVIDIA_VISIBLE_DEVICES={wish}")
    config = Config(kubelet_root=str(root))
    verdict = judge(spec, read_request(spec, config), config)
    devices = verdict.allowed.devices
    assert [str(each) for each in getattr(devices, "devices", ())] == given
    assert bool(verdict.denials) is not bool(given)
    for denial in verdict.denials:
        assert "of container main of pod b3808049-" in denial
        assert f"{root}/{CHECKPOINT}: NVIDIA_VISIBLE_DEVICES={FIRST}" in denial
