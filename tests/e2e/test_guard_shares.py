"""The memory guard and shares of claims: a container cannot choose its own memory limit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from integration.containers.shares import Share, variable_of
from integration.node.options import DRA_DRIVER
from shim.causes.record import read_causes
from tests.e2e.test_node_causes import GIB, in_pod, on_gpu
from tests.harness.dra_sharing import sharing_node
from tests.harness.runtime import remove_fifos
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.harness.dra_sharing import Sharing
    from tests.harness.kubelet_dra import Reference
    from tests.harness.runtime import Container, Runtime


def _note(place: Sharing, **pods: Reference) -> None:
    """Write the kubelet's record of each pod's claim."""
    claims = [
        {
            "ClaimUID": uid, "ClaimName": name, "Namespace": "default",
            "PodUIDs": {f"uid-{pod}": {}}, "DriverState": {DRA_DRIVER: {"Devices": []}},
        }
        for pod, (_, uid, name) in pods.items()
    ]  # fmt: skip
    data = {"kind": "DRACheckpoint", "ClaimInfoStateList": claims}
    with open(f"{place.root}/dra_manager_state", "w", encoding="utf-8") as file:
        json.dump({"Data": json.dumps(data), "Checksum": 1}, file)


@pytest.fixture
def place(runtime: Runtime, configure: Callable[[str], None]) -> Iterator[Sharing]:
    """Return a node whose GPUs have four shares each, and whose agent guards their memory."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    state = runtime.containerd.bundle("x").rpartition("/io.containerd.")[0]
    with sharing_node(4) as place:
        place.agent.kill()
        with open(place.node.config_path, "a", encoding="utf-8") as file:
            file.write('\n[guard]\ninterval = 0.2\n\n[policy]\nmode = "nvidia"\n')
        with open(place.node.config_path, encoding="utf-8") as file:
            configure(file.read())
        place.agent = place.new_agent("--dra-shares", "4", "--containerd-state", state)
        try:
            place.start_again()
            yield place
        finally:
            place.agent.kill()
            runtime.close()
            remove_fifos(runtime.containerd)


def test_a_share_that_a_container_names_itself_gives_it_no_memory(
    runtime: Runtime, place: Sharing
) -> None:
    gpu, namespace = place.node.scenario.gpus[0], runtime.containerd.namespace
    mine, other = (
        place.part(name, gpu.uuid.lower(), f"{gib}Gi", gib // 10)
        for name, gib in (("mine", 10), ("other", 20))
    )
    answers = place.driver.prepare(mine, other)
    _note(place, greedy=mine, modest=other)
    own, others = (
        Share(answers[claim[1]].devices[0].share_id, gpu.uuid, gib << 10, gib // 10)
        for claim, gib in ((mine, 10), (other, 20))
    )
    # Its own share twice, and a share of another pod's claim.
    forged = [variable_of(own), variable_of(own._replace(shares=2)), variable_of(others)]
    flags = [word for each in forged for word in ("--env", each)]
    greedy = on_gpu(runtime, 0, *in_pod("greedy"), *flags)
    modest = on_gpu(runtime, 0, *in_pod("modest"), "--env", variable_of(others))

    def told(container: Container) -> list[str]:
        return [each.name for each in read_causes(place.node.state, namespace, container.name)]

    def use(greedy_gib: int, modest_gib: int) -> None:
        with open(f"{place.node.state}/nvml-processes", "w", encoding="ascii") as file:
            used = ((greedy, greedy_gib), (modest, modest_gib))
            file.writelines(f"0 {each.pid} {gib * GIB} 50 10 0 0\n" for each, gib in used)

    over = "{}.0 GiB of GPU memory, over its limit of {}.0 GiB"
    use(12, 18)
    eventually(lambda: told(greedy) == [over.format(12, 10)], "it is over its own share")
    assert told(modest) == []
    use(12, 22)
    eventually(lambda: told(modest) == [over.format(22, 20)], "so is the other")
