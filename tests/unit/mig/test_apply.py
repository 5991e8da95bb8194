"""Applying layouts to a simulated node with its own nvidia-smi: kills, failures and undo."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import Config, load_config
from hooks.node.drained import Drain, path_of, read_drains
from integration.devices import drain_marks as marks
from integration.devices.drain_errors import MarkUnwritten, ResetRunning
from integration.drain.serving import DrainOptions
from integration.files import replace_file
from integration.mig import apply as apply_module
from integration.mig import instances, journal
from integration.mig.apply import apply, undone
from integration.mig.errors import (
    LayoutFailed,
    LayoutHeld,
    LayoutImpossible,
    LayoutNotUndone,
    MigError,
    MigRecordUnusable,
)
from integration.mig.format import Entry, Layout
from integration.mig.profiles import ProfileName
from integration.mig.serving import apply_layout, compare, list_layouts
from integration.mig.state import MigGpu, read_gpus
from integration.node.state import claims_file
from integration.node.values.claims import Claim, ClaimDevice
from integration.nvml import nvidia_smi as nvidia_smi_module
from integration.nvml.inventory import inventory_of
from integration.nvml.nvidia_smi import SmiFailed
from integration.simulated import Scenario, SimulatedNode
from tests.harness.examples import seeds
from tests.harness.nvidia_smi import nvidia_smi
from tests.harness.nvshim import start_nvshim
from tests.harness.raising import raises
from tests.unit.mig.test_plan import KINDS, names_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# nvidia-smi cannot reset a simulated GPU: the pending mode becomes the current one.
NVIDIA_SMI: Final = """#!/bin/sh
if [ "$1" != --gpu-reset ]; then exec "$0.real" "$@"; fi
for file in {state}/nvml-mig-mode-*; do
    mode=$(cat "$file"); next=${{mode#?}}
    printf %s%s "$next" "$next" > "$file"
done
echo reset >> {state}/resets
"""


class Place:
    """A node, and the layouts that are applied to it."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.config: Config = load_config(node.config_path)
        nobody = Path(node.directory, "nobody")
        nobody.mkdir()
        # Ignore the containers and processes of this machine.
        self.options = DrainOptions(states=(str(nobody),), proc=str(nobody))
        self.journal = Path(node.directory, "mig.json")
        self.said: list[str] = []

    def apply(self, layout: Layout, options: DrainOptions | None = None) -> int:
        """Apply a layout; return how many GPUs are changed."""
        return len(apply(self.config, layout, options or self.options, self.said.append))

    def gpus(self) -> tuple[MigGpu, ...]:
        return read_gpus(self.config, inventory_of(self.config, fresh=True))

    def state(self) -> list[Any]:
        """Return the current and pending mode of each GPU, and the placements of its instances."""
        return [(each.now, each.parts.pending) for each in self.gpus()]

    def has(self, *profiles: str) -> None:
        """Check that each GPU has these MIG devices, and that nothing of an apply is left."""
        names = [" ".join(sorted(map(str, g.names(g.now.cuts).elements()))) for g in self.gpus()]
        assert names == [" ".join(sorted(each.split())) for each in profiles]
        self.is_clean()

    def is_clean(self) -> None:
        assert read_drains(self.config) == ()
        assert not self.journal.exists()

    def kill_at(self, layout: Layout, step: int) -> bool:
        """Apply a layout in a process that is killed before a step; return whether it was."""
        context = multiprocessing.get_context("fork")
        process = context.Process(target=self._killed, args=(layout, step))
        process.start()
        process.join()
        return process.exitcode == -signal.SIGKILL

    def _killed(self, layout: Layout, step: int) -> None:
        left = iter(range(step))

        def say(_: str) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        apply(self.config, layout, self.options, say)

    @contextmanager
    def suffers(self, fault: str) -> Iterator[None]:
        file = Path(self.node.state, "nvml-faults")
        file.write_text(fault, encoding="ascii")
        try:
            yield
        finally:
            file.unlink()


@contextmanager
def place_of(directory: Path, model: str, *mig: list[str] | None) -> Iterator[Place]:
    """Make a node whose GPUs are not in MIG mode (None), or have these devices."""
    gpus = [
        {"index": n} if each is None else {"index": n, "mig": each} for n, each in enumerate(mig)
    ]
    scenario = Scenario.parse({"gpus": len(gpus), "model": model, "gpu": gpus})
    with SimulatedNode.create(str(directory / "node"), scenario) as node:
        program = Path(node.driver_root, "usr/bin/nvidia-smi")
        program.rename(f"{program}.real")
        program.write_text(NVIDIA_SMI.format(state=node.state), encoding="ascii")
        program.chmod(0o755)
        yield Place(node)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Make a node with an H100 with two devices, a whole one, and one that the layout excludes."""
    with place_of(tmp_path, "h100", ["3g.40gb", "1g.10gb"], None, ["1g.10gb"]) as place:
        yield place


def layout(*gpus: str | None) -> Layout:
    """Return a layout with these devices for each GPU, or with MIG off."""
    entries = [
        Entry((), frozenset({n}), each is not None, Counter(map(name, (each or "").split())))
        for n, each in enumerate(gpus)
    ]
    return Layout("some", tuple(entries))


def name(text: str) -> ProfileName:
    found = ProfileName.parse(text)
    assert found is not None
    return found


def file_of(directory: Path, **layouts: list[dict[str, Any]]) -> str:
    path = directory / "layouts.json"
    path.write_text(json.dumps({"version": "v1", "mig-configs": layouts}))
    return str(path)


NEXT: Final = layout("1g.10gb 2g.20gb 2g.20gb", "7g.80gb")


def test_gpus_get_what_the_layout_says_and_the_rest_stays(place: Place) -> None:
    before = place.state()
    assert place.apply(NEXT) == 2
    place.has("1g.10gb 2g.20gb 2g.20gb", "7g.80gb", "1g.10gb")
    kept = before[0][0].cuts & place.state()[0][0].cuts
    assert [cut.profile for cut in kept] == [19], "what is wanted still runs on"
    assert place.state()[2] == before[2]
    inventory = inventory_of(place.config)
    assert [mig.drained for mig in inventory.mig_devices] == [""] * 5
    for device in inventory.mig_devices:
        for path in device.paths:
            assert os.path.exists(place.node.dev + path.removeprefix("/dev"))
    place.said.clear()
    assert place.apply(NEXT) == 0
    assert place.said == []
    assert place.apply(layout(None, None, None)) == 3
    place.has("", "", "")
    assert not any(each.now.mode for each in place.gpus())


@pytest.mark.thorough
def test_a_gpu_keeps_nvml_closed_only_until_it_is_done(place: Place) -> None:
    closed: list[list[str]] = []

    def say(line: str) -> None:
        if "switches" in line:
            closed.append([each.device for each in read_drains(place.config) if each.for_reset])

    apply(place.config, layout(None, "7g.80gb"), place.options, say)
    uuids = [gpu.uuid for gpu in place.node.scenario.gpus]
    assert closed == [sorted(uuids[:2]), [uuids[1]]]


@pytest.mark.parametrize(
    "model",
    [pytest.param(each, marks=[pytest.mark.thorough] * (each != "a100")) for each in KINDS],
)
def test_each_kind_of_gpu_is_partitioned(tmp_path: Path, model: str) -> None:
    by_size = sorted(names_of(model))
    smallest, two, three = by_size[0], *(n for n in by_size if n.slices in {2, 3})
    with place_of(tmp_path, model, None) as place:
        devices = f"1c.{three} 1c.{three} {two} {smallest} {smallest}"
        place.apply(layout(devices))
        place.has(devices)
        resets = Path(place.node.state, "resets")
        assert resets.exists() is (model == "a100"), "only Ampere needs one"


def test_what_a_killed_one_has_begun_is_undone_by_the_next(place: Place) -> None:
    before = place.state()
    assert place.kill_at(NEXT, 4)
    marked = {mark.device for mark in read_drains(place.config)}
    assert marked == {gpu.uuid for gpu in place.node.scenario.gpus[:2]}
    inventory = inventory_of(place.config, fresh=True)
    assert all(mig.drained for mig in inventory.mig_devices if mig.gpu != 2), "nobody gets one"
    with raises(LayoutImpossible):
        place.apply(layout("7g.80gb 1g.10gb"))
    assert place.state() == before
    place.is_clean()


DAMAGED: Final[dict[str, Callable[[bytes], bytes]]] = {
    "cut off": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "of another release": lambda content: content.replace(b'"format": 1', b'"format": 2'),
    "no object": lambda _: b"[]",
    "too large a number": lambda content: content.replace(b"19", b"1e999", 1),
}


def test_nothing_is_applied_over_what_a_killed_one_has_begun_while_its_record_is_damaged(
    place: Place,
) -> None:
    before = place.state()
    assert place.kill_at(NEXT, 4)
    half, content = place.state(), place.journal.read_bytes()
    changed = [gpu.uuid for gpu in place.node.scenario.gpus[:2]]
    said = rf"mig\.json: it is damaged.*{', '.join(changed)}"
    for how, damage in DAMAGED.items():
        place.journal.write_bytes(damage(content))
        for wanted in (Layout("none", ()), NEXT):
            with raises(MigRecordUnusable, match=said):
                place.apply(wanted)
            with raises(MigRecordUnusable):
                undone(place.config, place.gpus())
        assert place.state() == half, how
        assert place.journal.read_bytes() == damage(content), f"nothing is lost: {how}"
        assert {mark.device for mark in read_drains(place.config)} == {*changed}, how
    place.journal.write_bytes(content)
    place.apply(Layout("none", ()))
    assert place.state() == before
    place.is_clean()


def test_gpus_that_a_person_returns_to_service_need_no_record(place: Place) -> None:
    assert place.kill_at(NEXT, 4)
    place.journal.write_bytes(b"damaged")
    for mark in read_drains(place.config):
        marks.take(place.config, mark.device)
    place.apply(NEXT)
    place.has("1g.10gb 2g.20gb 2g.20gb", "7g.80gb", "1g.10gb")


def test_a_gpu_whose_mark_is_damaged_is_not_left_half_changed(place: Place) -> None:
    before = place.state()
    assert place.kill_at(NEXT, 4)
    half, first = place.state(), Path(path_of(place.config, place.node.scenario.gpus[0].uuid))
    content = first.read_bytes()
    first.write_bytes(b"")
    with raises(MigRecordUnusable, match=f"{first}: it is empty or damaged"):
        place.apply(NEXT)
    assert place.state() == half
    first.write_bytes(content)
    place.apply(Layout("none", ()))
    assert place.state() == before
    place.is_clean()


@pytest.mark.thorough
def test_one_that_is_killed_at_any_step_is_undone_or_finished(place: Place) -> None:
    before, step = place.state(), 0
    while place.kill_at(NEXT, step):
        place.apply(Layout("none", ()))
        assert place.state() == before, step
        place.is_clean()
        step += 1
    assert step >= 5
    place.has("1g.10gb 2g.20gb 2g.20gb", "7g.80gb", "1g.10gb")


@pytest.mark.thorough
@pytest.mark.parametrize("is_done", [False, True])
def test_one_that_is_killed_at_any_effect_is_undone_or_finished(
    tmp_path: Path, *, is_done: bool
) -> None:
    """Before or after it; and some of those that undo it are killed, too."""
    dice = random.Random(1)
    with place_of(tmp_path, "a100", ["3g.20gb", "1g.5gb"], None) as place:
        before, effect = place.state(), 0
        wanted = layout("1c.3g.20gb 1c.3g.20gb 2g.10gb", "7g.40gb")
        while killed_at_effect(place, wanted, effect, is_done=is_done):
            for _ in range(dice.randint(0, 2)):
                nothing, some = Layout("none", ()), dice.randint(0, 12)
                killed_at_effect(place, nothing, some, is_done=not is_done)
            place.apply(Layout("none", ()))
            place.is_clean()
            if place.state() != before:
                pairs = zip(place.gpus(), wanted.entries, strict=True)
                assert all(as_it_says(gpu, entry) for gpu, entry in pairs), effect
                place.apply(layout("3g.20gb 1g.5gb", None))
                before = place.state()
            effect += 1
        assert effect >= 20
        place.is_clean()


EFFECTS: Final[tuple[tuple[Any, str], ...]] = (
    (marks, "put"), (marks, "step"), (marks, "finish"), (journal, "write"), (journal, "remove"),
    (instances, "run_nvidia_smi"), (instances, "run_alone"), (apply_module, "create"),
)  # fmt: skip


def killed_at_effect(place: Place, wanted: Layout, number: int, *, is_done: bool) -> bool:
    """Have an apply killed before or after an effect; return whether it came to that."""
    left = iter(range(number))

    def kills(effect: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        is_last = next(left, None) is None
        if is_last and not is_done:
            os.kill(os.getpid(), signal.SIGKILL)
        result = effect(*arguments, **named)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def run() -> None:
        for module, name in EFFECTS:
            setattr(module, name, partial(kills, getattr(module, name)))
        place.apply(wanted)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.thorough
def test_one_that_is_killed_when_all_is_done_is_finished(place: Place) -> None:
    def killed(config: Config, device: str) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return bool(config and device)

    def run() -> None:
        marks.finish = killed
        apply(place.config, NEXT, place.options, place.said.append)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(read_drains(place.config)) == 2
    assert place.apply(NEXT) == 0
    assert place.said == []
    place.has("1g.10gb 2g.20gb 2g.20gb", "7g.80gb", "1g.10gb")


def test_what_fails_is_undone_on_all_gpus(place: Place) -> None:
    before = place.state()
    with (
        place.suffers("gpu1.nvmlDeviceCreateGpuInstanceWithPlacement=error:999"),
        raises(LayoutFailed, match="on GPU 1 .*nvidia-smi exited with status .*Unknown Error"),
    ):
        place.apply(NEXT)
    assert place.state() == before
    place.is_clean()


def test_a_disk_that_is_full_in_the_middle_keeps_nothing_from_being_undone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.apply(layout("1g.10gb", "3g.40gb"))
    before = place.state()
    place.said.clear()

    def full(path: str, content: bytes) -> None:
        if place.said:  # the first instance is being destroyed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        replace_file(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(marks, "replace_file", full)
        with raises(MarkUnwritten, match="No space left on device"):
            place.apply(layout("2g.20gb", "4g.40gb"))
    assert place.state() == before
    place.is_clean()


def test_an_instance_that_cannot_be_destroyed_gets_its_devices_back(place: Place) -> None:
    before = place.state()
    with (
        place.suffers("nvmlGpuInstanceDestroy=error:19"),
        raises(LayoutFailed, match="on GPU 0 .*In use by another client"),
    ):
        place.apply(NEXT)
    assert place.state() == before
    place.is_clean()


@pytest.mark.thorough
def test_a_last_step_that_fails_after_its_effect_is_undone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, run, once = place.state(), nvidia_smi_module.run_nvidia_smi, iter([True])

    def run_late(*arguments: Any, **named: Any) -> str:
        said = run(*arguments, **named)
        if next(once, False):
            raise SmiFailed("nvidia-smi did not exit within 30 s")
        return said

    monkeypatch.setattr(instances, "run_nvidia_smi", run_late)
    with raises(LayoutFailed, match="on GPU 1 .*did not exit"):
        place.apply(layout("3g.40gb 1g.10gb", "7g.80gb"))
    assert place.state() == before
    place.is_clean()


@pytest.mark.thorough
def test_an_interrupt_is_undone(place: Place) -> None:
    before, once = place.state(), iter([True])

    def say(line: str) -> None:
        if "creates" in line and next(once, False):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply(place.config, layout("2g.20gb"), place.options, say)
    assert place.state() == before
    place.is_clean()


@pytest.mark.thorough
def test_an_interrupt_while_it_undoes_an_earlier_one_ends_it_then(place: Place) -> None:
    before = place.state()
    assert place.kill_at(NEXT, 4)

    def apply_interrupted() -> None:
        once = iter([True])

        def say(_: str) -> None:
            if next(once, False):
                signal.raise_signal(signal.SIGINT)

        apply(place.config, layout("7g.80gb"), place.options, say)

    fault = "gpu0.nvmlDeviceCreateGpuInstanceWithPlacement=error:999"
    with place.suffers(fault), raises(LayoutNotUndone, match="on GPU 0 "):
        apply_interrupted()
    with pytest.raises(KeyboardInterrupt):
        apply_interrupted()
    assert place.state() == before
    place.is_clean()


@pytest.mark.thorough
def test_an_interrupt_while_gpus_return_to_service_leaves_none_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = marks.finish

    def interrupted(config: Config, device: str) -> bool:
        signal.raise_signal(signal.SIGINT)
        return finish(config, device)

    monkeypatch.setattr(marks, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place.apply(NEXT)
    place.has("1g.10gb 2g.20gb 2g.20gb", "7g.80gb", "1g.10gb")


@pytest.mark.thorough
def test_a_dry_run_after_a_kill_shows_what_the_next_apply_does(
    place: Place, tmp_path: Path
) -> None:
    entry = {"devices": [0, 1], "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}
    path = file_of(tmp_path, a=[entry])

    def dry_run() -> list[Any]:
        answer = apply_layout(place.config, path, "a", place.options, print, dry_run=True)
        gpus = compare(place.config, path, "a")["gpus"]
        assert isinstance(gpus, list)
        assert answer["gpus"] == gpus
        return gpus

    before = dry_run()
    assert place.kill_at(NEXT, 4)
    assert dry_run() == before
    place.apply(NEXT)
    assert dry_run() != before


@pytest.mark.thorough
def test_a_dry_run_undoes_what_a_killed_one_made_if_a_gpu_is_lost(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"devices": [0], "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}
    path = file_of(tmp_path, a=[entry])

    def killed(*_: object) -> None:
        raise SystemExit

    before, state = compare(place.config, path, "a"), place.state()[0]
    with monkeypatch.context() as patched:
        patched.setattr(apply_module, "_finish", killed)
        with pytest.raises(SystemExit):
            place.apply(NEXT)
    with without_gpu(place, 1):
        assert compare(place.config, path, "a") == before
        place.apply(Layout("none", ()))
        assert place.state()[0] == state


@contextmanager
def without_gpu(place: Place, number: int) -> Iterator[None]:
    gpu = place.gpus()[number].gpu
    with ExitStack() as gone:
        for path in (f"dev/nvidia{gpu.minor}", f"proc/driver/nvidia/gpus/{gpu.bus_id}"):
            there = Path(place.node.directory, path)
            away = there.rename(Path(place.node.directory, there.name))
            gone.callback(away.rename, there)
        yield


@pytest.mark.thorough
def test_what_is_made_while_it_waits_is_waited_for_too(place: Place) -> None:
    claims_file.save(place.config, [part_of(place, 0)])
    options = DrainOptions(states=place.options.states, proc=place.options.proc, seconds=600.0)
    uuid = place.node.scenario.gpus[0].uuid
    waited: list[str] = []

    def say(line: str) -> None:
        if not line.startswith("waits for"):
            return
        waited.append(line)
        if len(waited) > 1:
            claims_file.save(place.config, [])
            return
        nvidia_smi(place.node, "mig", "-i", "0", "-cgi", "19:6", "-C")
        made = [each.uuid for each in inventory_of(place.config, fresh=True).mig_devices]
        claims_file.save(place.config, [replace(claim_of(made[2], uuid), name="two")])

    apply(place.config, layout("7g.80gb"), options, say)
    assert waited == ["waits for claim default/one", "waits for claim default/two"]
    place.has("7g.80gb", "", "1g.10gb")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_waits_gives_the_gpus_back(
    place: Place, tmp_path: Path, number: signal.Signals
) -> None:
    claims_file.save(place.config, [part_of(place, 0)])
    file = file_of(tmp_path, a=[{"devices": [0], "mig-enabled": False}])
    nobodys = ("--config", place.node.config_path, "--containerd-state", *place.options.states)
    with start_nvshim("mig", "apply", "--wait=ever", file, *nobodys, stderr=PIPE) as process:
        assert process.stderr is not None
        assert b"waits for claim default/one" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    place.is_clean()


def test_an_apply_whose_messages_nobody_reads_is_undone(place: Place) -> None:
    """As that of an agent that was killed."""
    before, gone = place.state(), False

    def say(line: str) -> None:
        nonlocal gone
        gone = gone or "creates" in line
        if gone:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        apply(place.config, NEXT, place.options, say)
    assert place.state() == before
    place.is_clean()


def test_only_a_gpu_that_cannot_be_undone_stays_out_of_service(place: Place) -> None:
    before, device = place.state(), place.node.scenario.gpus[0].uuid
    assert place.kill_at(NEXT, 4)
    with (
        place.suffers("gpu0.nvmlDeviceCreateGpuInstanceWithPlacement=error:999"),
        raises(LayoutNotUndone, match="on GPU 0 .*Unknown Error"),
    ):
        place.apply(NEXT)
    assert [mark.device for mark in read_drains(place.config)] == [device]
    assert place.state()[1:] == before[1:]
    assert place.apply(Layout("none", ())) == 0
    assert place.state() == before
    place.is_clean()


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["GetGpuInstances", "GetMigDeviceHandleByIndex"])
def test_a_gpu_that_says_too_little_is_left_alone(place: Place, call: str) -> None:
    before = place.state()
    with (
        place.suffers(f"gpu0.nvmlDevice{call}=error:999"),
        raises(LayoutImpossible, match="on GPU 0 .*NVML does not list it"),
    ):
        place.apply(layout("1g.10gb 1g.10gb"))
    assert place.state() == before
    place.is_clean()


def test_a_driver_that_has_no_places_while_the_mode_is_off_has_no_profiles(tmp_path: Path) -> None:
    """A layout that wants the mode off is applied already."""
    call = "nvmlDeviceGetGpuInstancePossiblePlacements"
    with place_of(tmp_path, "h100", None) as place, place.suffers(f"{call}=error:3"):
        (gpu,) = place.gpus()
        assert gpu.answers
        assert not gpu.profiles
        assert place.apply(layout(None)) == 0


@pytest.mark.thorough
def test_a_gpu_whose_reset_failed_after_a_kill_stays_out_of_service(place: Place) -> None:
    device = place.node.scenario.gpus[0].uuid
    assert place.kill_at(NEXT, 2)
    marks.put(place.config, Drain(device, reset="waits"))
    marks.step(place.config, device, "it failed: GPU is lost")
    for wanted in (Layout("none", ()), NEXT):
        place.apply(wanted)
        assert [mark.device for mark in read_drains(place.config)] == [device]
    assert not place.journal.exists()


def test_nvml_is_closed_while_a_pending_mode_is_undone(tmp_path: Path) -> None:
    """The layout leaves the current mode as it is."""
    closed: list[list[str]] = []
    with place_of(tmp_path, "a100", None) as place:
        nvidia_smi(place.node, "-i", "0", "-mig", "1")
        assert place.kill_at(layout(None), 0)

        def say(line: str) -> None:
            if "switches" in line:
                closed.append([each.device for each in read_drains(place.config) if each.for_reset])

        apply(place.config, Layout("none", ()), place.options, say)
        assert closed == [[place.node.scenario.gpus[0].uuid]]
        assert [then for _, then in place.state()] == [False]
        place.is_clean()


def test_what_cannot_be_undone_stays_out_of_service_until_it_is(place: Place) -> None:
    before = place.state()
    with place.suffers("nvmlDeviceCreateGpuInstanceWithPlacement=error:999"):
        for _ in range(2):
            with raises(LayoutNotUndone, match="Unknown Error"):
                place.apply(layout("7g.80gb"))
    (mark,) = read_drains(place.config)
    assert mark.device == place.node.scenario.gpus[0].uuid
    assert "changed back" in mark.reset
    assert place.apply(Layout("none", ())) == 0
    assert place.state() == before
    place.is_clean()


def test_a_gpu_that_is_lost_in_the_middle_is_undone_when_it_is_back(place: Place) -> None:
    before, lost = place.state(), Path(place.node.state, "nvml-faults")

    def say(line: str) -> None:
        if "GPU 0: creates" in line:
            lost.write_text("gpu0=error:15", encoding="ascii")

    with raises(LayoutNotUndone, match="GPU is lost"):
        apply(place.config, NEXT, place.options, say)
    marked = {mark.device: mark.reset for mark in read_drains(place.config)}
    assert marked == {
        place.node.scenario.gpus[0].uuid:
            "MIG layout: MIG devices are changed back when the GPU answers again"
    }  # fmt: skip
    lost.unlink()
    assert place.state() != before
    assert place.apply(Layout("none", ())) == 0
    assert place.state() == before
    place.is_clean()


@pytest.mark.thorough
def test_other_gpus_get_layouts_while_one_that_was_changed_is_away(place: Place) -> None:
    before, device = place.state(), place.node.scenario.gpus[1].uuid
    assert place.kill_at(NEXT, 4)
    assert place.state()[1] != before[1]
    with without_gpu(place, 1):
        assert place.apply(layout("7g.80gb")) == 1
        with place.suffers("nvmlGpuInstanceDestroy=error:19"), raises(LayoutFailed):
            place.apply(layout("1g.10gb"))
        assert [mark.device for mark in read_drains(place.config)] == [device]
    assert place.apply(layout("7g.80gb")) == 0
    assert place.state()[1] == before[1]
    place.has("7g.80gb", "", "1g.10gb")


@pytest.mark.thorough
def test_a_gpu_that_is_lost_before_it_is_changed_is_returned_to_service(place: Place) -> None:
    before, lost = place.state(), Path(place.node.state, "nvml-faults")
    claims_file.save(place.config, [part_of(place, 0)])
    options = DrainOptions(states=place.options.states, proc=place.options.proc, seconds=60.0)

    def say(line: str) -> None:
        if "waits for" in line:
            lost.write_text("gpu1=error:15", encoding="ascii")
            claims_file.save(place.config, [])

    with raises(LayoutImpossible):
        apply(place.config, NEXT, options, say)
    lost.unlink()
    assert place.state() == before
    place.is_clean()


def test_a_gpu_whose_reset_failed_stays_out_of_service(place: Place) -> None:
    device = place.node.scenario.gpus[0].uuid
    marks.put(place.config, Drain(device, reset="it failed: GPU is lost", reason="Xid 79"))
    assert place.apply(NEXT) == 2
    (mark,) = read_drains(place.config)
    assert (mark.device, mark.reason, mark.reset) == (device, "Xid 79", "")


@pytest.mark.thorough
def test_what_a_person_returned_to_service_is_not_undone(place: Place) -> None:
    place.kill_at(NEXT, 1)
    for mark in read_drains(place.config):
        marks.take(place.config, mark.device)
    half = place.state()
    place.apply(Layout("none", ()))
    assert place.state() == half
    place.is_clean()


@pytest.mark.thorough
def test_what_a_person_took_out_of_service_stays_so(place: Place) -> None:
    device = place.node.scenario.gpus[0].uuid
    marks.put(place.config, Drain(device, reason="fan"))
    assert place.apply(NEXT) == 2
    (mark,) = read_drains(place.config)
    assert (mark.device, mark.reason, mark.reset) == (device, "fan", "")


@pytest.mark.thorough
def test_what_a_person_took_out_of_service_after_a_kill_is_undone_and_stays_so(
    place: Place,
) -> None:
    before, device = place.state(), place.node.scenario.gpus[0].uuid
    assert place.kill_at(NEXT, 4)
    marks.put(place.config, Drain(device, reason="fan"))
    place.apply(Layout("none", ()))
    assert place.state() == before
    (mark,) = read_drains(place.config)
    assert (mark.device, mark.reason, mark.reset) == (device, "fan", "")


def claim_of(device: str, gpu: str) -> Claim:
    return Claim(
        "uid", "default", "one", (ClaimDevice("gpu", "node", device.lower(), device, gpu),)
    )


def part_of(place: Place, gpu: int) -> Claim:
    uuid = place.node.scenario.gpus[gpu].uuid
    return claim_of(f"{uuid.lower()}-mig-1g10gb-19-6", uuid)


def test_claims_are_refused_by_name_and_nothing_is_changed(place: Place) -> None:
    before, uuid = place.state(), place.node.scenario.gpus[0].uuid
    devices = {mig.profile: mig.uuid for mig in inventory_of(place.config).mig_devices
               if mig.gpu == 0}  # fmt: skip
    claims_file.save(place.config, [part_of(place, 0)])
    asked = r"claim default/one holds what it removes. Delete its pod; .*; then apply it again"
    with raises(LayoutHeld, match=asked):
        place.apply(NEXT)
    assert place.state() == before
    place.is_clean()
    claims_file.save(place.config, [claim_of(devices["3g.40gb"], uuid)])
    with raises(LayoutHeld):
        place.apply(NEXT)
    # A holder of a device that stays is ignored, and one of a GPU that does not change.
    claims_file.save(place.config, [claim_of(devices["1g.10gb"], uuid), part_of(place, 2)])
    assert place.apply(NEXT) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("dra-mig.json", "made", [{"claim": "uid", "title": "claim default/old", "uuid": "",
                                   "part": {"gpu": 0, "profile": 19, "start": 6, "size": 1}}]),
        ("dra-mig-mode.json", "gpus", [0]),
    ],
)  # fmt: skip
def test_what_the_driver_has_not_taken_back_yet_is_waited_for(
    place: Place, file: str, key: str, value: Any
) -> None:
    text = json.dumps(value).replace('"gpu": 0', '"gpu": "UUID"').replace("[0]", '["UUID"]')
    uuid = place.node.scenario.gpus[0].uuid
    claims_file.write_record(place.config, file, key, text.replace("UUID", uuid))
    with raises(LayoutHeld, match="has ended"):
        place.apply(NEXT)
    path = Path(place.node.state, file)
    options = DrainOptions(states=place.options.states, proc=place.options.proc, seconds=60.0)

    def say(line: str) -> None:
        if "waits for" in line:
            path.unlink()

    assert len(apply(place.config, NEXT, options, say)) == 2


def test_a_layout_for_no_gpu_of_the_node_is_impossible(place: Place, tmp_path: Path) -> None:
    entry = {"devices": "all", "mig-enabled": True, "mig-devices": {}}
    path = file_of(tmp_path, a=[entry | {"device-filter": "0x20B010DE"}], b=[entry])
    rows = {row["name"]: row["state"] for row in list_layouts(place.config, path)}
    assert rows == {"a": "impossible", "b": "possible"}


def test_one_apply_or_reset_runs_at_a_time(place: Place) -> None:
    with marks.resetting(place.config), raises(ResetRunning, match="`nvshim mig apply`"):
        place.apply(NEXT)


# -- many layouts ------------------------------------------------------------------------------


def random_layout(model: str, gpus: int, dice: random.Random) -> Layout:
    """Return random devices, which may or may not fit on a GPU."""
    profiles = sorted(names_of(model))
    chosen = [
        None if dice.random() < 0.15 else " ".join(
            str(dice.choice(profiles)) for _ in range(dice.randint(0, 4))
        )
        for _ in range(gpus)
    ]  # fmt: skip
    return layout(*chosen)


def as_it_says(gpu: MigGpu, entry: Entry) -> bool:
    return gpu.now.mode is entry.enabled and gpu.names(gpu.now.cuts) == dict(entry.counts)


@pytest.mark.thorough
@pytest.mark.seeded
@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("seed", seeds(1))
def test_of_many_layouts_each_is_reached_or_undone(tmp_path: Path, model: str, seed: int) -> None:
    """The test tries 25 layouts of each model in turn; some runs are killed, and some fail."""
    dice = random.Random(seed)
    with place_of(tmp_path, model, None, None) as place:
        for _ in range(25):
            wanted, before = random_layout(model, 2, dice), place.state()
            end: Callable[[], object] = partial(place.apply, wanted)
            trouble = dice.random()
            if trouble < 0.25:
                end = partial(place.kill_at, wanted, dice.randint(0, 8))
            try:
                if 0.25 <= trouble < 0.4:
                    with place.suffers("gpu1.nvmlDeviceCreateGpuInstanceWithPlacement=error:999"):
                        end()
                else:
                    end()
                place.apply(Layout("none", ()))
            except MigError:
                place.apply(Layout("none", ()))
                assert place.state() == before
            if place.state() != before:
                pairs = zip(place.gpus(), wanted.entries, strict=True)
                assert all(as_it_says(gpu, entry) for gpu, entry in pairs), wanted
            place.is_clean()
