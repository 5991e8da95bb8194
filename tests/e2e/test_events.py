"""The events of a task: which, in which order, and what they say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.events import Recorder
from tests.harness.runtime import Runtime, new_name
from tests.tools.containerd import PrivateContainerd


@pytest.fixture
def recorder(containerd: PrivateContainerd) -> Iterator[Recorder]:
    """Records what containerd publishes during the test."""
    with Recorder(containerd) as recorder:
        yield recorder


def _until_deleted(names: list[str]) -> bool:
    return "delete" in names


def test_events_of_a_container_come_in_order(runtime: Runtime, recorder: Recorder) -> None:
    name = new_name()
    runtime.run("sh", "-c", "exit 6", name=name)
    assert recorder.wait_for(name, _until_deleted) == ["create", "start", "exit", "delete"]
    create, start, end, delete = recorder.of(name)
    assert create.fields["bundle"] == runtime.containerd.bundle(name)
    assert create.fields["pid"] == start.fields["pid"] == end.fields["pid"] == delete.fields["pid"]
    assert end.fields["id"] == name
    assert end.fields["exit_status"] == delete.fields["exit_status"] == 6
    assert end.fields["exited_at"] == delete.fields["exited_at"]


def test_events_of_an_exec_come_in_order(runtime: Runtime, recorder: Recorder) -> None:
    container = runtime.start_idle()
    exec_id = new_name("e")
    words = container.exec_words("sh", "-c", "exit 3", exec_id=exec_id)
    assert runtime.containerd.ctr(*words, check=False).code == 3
    container.kill("KILL")
    container.exit_code()
    assert recorder.wait_for(container.name, _until_deleted) == [
        "create",
        "start",
        f"exec-added {exec_id}",
        f"exec-started {exec_id}",
        f"exit {exec_id}",
        "exit",
        "delete",
    ]
    ended = recorder.of(container.name)[4]
    assert ended.fields["exit_status"] == 3


def test_container_that_cannot_be_created_publishes_no_start(
    runtime: Runtime, recorder: Recorder
) -> None:
    name = new_name()
    assert runtime.run("no-such-program", name=name).code == 1
    runtime.run("true", name=(later := new_name()))
    recorder.wait_for(later, _until_deleted)
    names = [event.short for event in recorder.of(name)]
    assert "start" not in names
    assert "exit" not in names
