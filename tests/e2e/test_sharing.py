"""Limits on containers per GPU: what a real containerd gets as an answer, and what is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from integration.simulated import SimulatedNode
from tests.harness.node import words_of
from tests.harness.runtime import Runtime, is_alive, new_name, remove_fifos
from tests.harness.waiting import eventually
from tools.containerd import Completed, PrivateContainerd
from tools.images import GLIBC

ON_GPU_0: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=0")
ON_GPU_1: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=1")


@pytest.fixture
def limit(
    runtime: Runtime, two_gpus: SimulatedNode, configure: Any, containerd: PrivateContainerd
) -> Iterator[Callable[[str], None]]:
    """Set limits on the node with two GPUs."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")

    def write(lines: str) -> None:
        configure(f"[sharing]\n{lines}\n", node=two_gpus)

    yield write
    runtime.close()
    remove_fifos(containerd)
    assert claims(two_gpus) == []


def claims(node: SimulatedNode) -> list[str]:
    directory = os.path.join(node.state, "claims")
    return [name for name in os.listdir(directory) if name != "lock"]


def try_one(runtime: Runtime, name: str, flags: tuple[str, ...] = ON_GPU_0) -> Completed:
    words = runtime.words("sleep", "1000", image=GLIBC, name=name, flags=("--detach", *flags))
    done: Completed = runtime.containerd.ctr(*words, check=False)
    if done.code:
        runtime.containerd.ctr("containers", "rm", name, check=False)
    return done


def test_the_second_waits_for_the_first_to_be_deleted_or_cleaned_up(
    runtime: Runtime, two_gpus: SimulatedNode, limit: Callable[[str], None]
) -> None:
    # Containers from before the limit count as well; GPUs without a limit are not checked.
    limit('holders = "any"')
    first = runtime.start_idle(image=GLIBC, flags=ON_GPU_0)
    limit('holders-of = ["0=exclusive"]')
    runtime.start_idle(image=GLIBC, flags=ON_GPU_1)
    runtime.start_idle(image=GLIBC, flags=ON_GPU_1)
    second = runtime.expect()
    refused = try_one(runtime, second.name)
    assert refused.code == 1
    assert "NVSHIM-E0228 device-held: GPU 0 (GPU-" in refused.stderr
    assert f"and {runtime.containerd.namespace}/{first.name} has it" in refused.stderr
    assert not os.path.exists(runtime.containerd.bundle(second.name))
    first.remove()
    assert try_one(runtime, second.name).code == 0
    third = runtime.expect()
    assert f"/{second.name} has it" in try_one(runtime, third.name).stderr
    assert len(claims(two_gpus)) == 1

    # The shim was killed: its container keeps the GPU until it has exited.
    init = second.pid
    shims = runtime.containerd.shim_pids()
    (shim,) = [pid for pid in shims if second.name in words_of(pid)]
    os.kill(shim, signal.SIGKILL)
    eventually(lambda: not os.path.exists(runtime.containerd.bundle(second.name)), "cleaned up")
    assert not is_alive(init)
    second.remove()
    assert try_one(runtime, third.name).code == 0


def test_of_many_at_once_as_many_as_may_have_it(
    runtime: Runtime, two_gpus: SimulatedNode, limit: Callable[[str], None]
) -> None:
    limit('holders = "exclusive"\nholders-of = ["1=2"]')
    names = [new_name() for _ in range(6)]  # for each GPU, one more than its limit
    done: dict[str, Completed] = {}

    def start(name: str, flags: tuple[str, ...]) -> None:
        done[name] = try_one(runtime, name, flags)

    for name in names:
        runtime.expect(name)
    threads = [
        threading.Thread(target=start, args=(name, (ON_GPU_0, ON_GPU_1)[number % 2]))
        for number, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(done[name].code == 0 for name in names[0::2]) == 1
    assert sum(done[name].code == 0 for name in names[1::2]) == 2
    assert all("NVSHIM-E0228" in each.stderr for each in done.values() if each.code)
    assert len(claims(two_gpus)) == 3


def test_one_too_many_starts_without_if_so_configured(
    runtime: Runtime, limit: Callable[[str], None]
) -> None:
    limit('holders = 1\nbeyond = "start"')
    runtime.start_idle(image=GLIBC, flags=ON_GPU_0)
    seen = runtime.run("sh", "-c", "ls /dev/nvidia* || true", image=GLIBC, flags=ON_GPU_0)
    assert seen.code == 0
    assert "/dev/nvidia0\n" not in seen.stdout
