"""MIG devices that the node's own nvidia-smi creates and deletes, as programs see them."""

from __future__ import annotations

import os
import re

import pytest

from hooks.config import load_config
from integration.nvml.inventory import inventory_of
from integration.simulated import Scenario, SimulatedNode
from integration.simulated.capabilities import access_minor
from tests.unit.simulated.conftest import AskNvml, MakeNode, Smi
from tools.nodes import changed_node

# Exit statuses of nvidia-smi, which are nvmlReturn_t.
NOT_FOUND, IN_USE, INSUFFICIENT_RESOURCES = 6, 19, 23


@pytest.fixture
def node(make_node: MakeNode) -> SimulatedNode:
    whole, cut = {"index": 0}, {"index": 1, "mig": ["1g.10gb"]}
    return make_node(Scenario.parse({"gpus": 2, "model": "h100", "gpu": [whole, cut]}))


def devices(node: SimulatedNode, smi: Smi) -> list[str]:
    """Return the profiles that nvidia-smi lists."""
    return re.findall(r"^  MIG (\S+)", smi(node, "-L").stdout, re.MULTILINE)


def test_nvidia_smi_makes_a_device_where_it_is_told_to(node: SimulatedNode, smi: Smi) -> None:
    done = smi(node, "mig", "-i", "1", "-cgi", "9:4")
    assert done.stdout.startswith("Successfully created GPU instance ID  1 on GPU  1"), done
    assert devices(node, smi) == ["1g.10gb"], "it has no compute instance yet"
    done = smi(node, "mig", "-i", "1", "-gi", "1", "-cci")
    assert done.stdout.startswith("Successfully created compute instance ID  0 on GPU  1"), done
    assert devices(node, smi) == ["1g.10gb", "3g.40gb"]
    assert re.search(r"\|   1  MIG 3g\.40gb +9 +1 +4:4 +\|", smi(node, "mig", "-lgi").stdout)

    device = next(
        each
        for each in inventory_of(load_config(node.config_path), fresh=True).mig_devices
        if each.profile == "3g.40gb"
    )
    assert device.caps == (access_minor(1, 1), access_minor(1, 1, 0))
    for path in device.paths:
        assert os.path.exists(node.dev + path.removeprefix("/dev"))


def test_what_has_no_room_or_is_in_use_is_refused(node: SimulatedNode, smi: Smi) -> None:
    assert smi(node, "mig", "-i", "1", "-cgi", "9:0").returncode == INSUFFICIENT_RESOURCES
    assert smi(node, "mig", "-i", "1", "-cgi", "20:2,20:3").returncode == INSUFFICIENT_RESOURCES
    whole = smi(node, "mig", "-i", "0", "-cgi", "19:2")  # its status differs between branches
    assert whole.stdout == "No MIG-enabled devices found.\n"
    assert devices(node, smi) == ["1g.10gb"]
    assert smi(node, "mig", "-i", "1", "-gi", "7", "-dgi").returncode == IN_USE
    with open(f"{node.state}/nvml-processes", "w", encoding="ascii") as file:
        file.write("1 4711 1048576 7 0\n")
    assert smi(node, "mig", "-i", "1", "-gi", "7", "-dci").returncode == IN_USE


def test_what_was_undone_is_gone_and_comes_back_as_it_was(node: SimulatedNode, smi: Smi) -> None:
    def undo() -> list[int]:
        steps = ("-dci", "-dgi")
        return [smi(node, "mig", "-i", "1", "-gi", "7", each).returncode for each in steps]

    before = smi(node, "-L").stdout
    assert undo() == [0, 0]
    assert devices(node, smi) == []
    assert not os.path.exists(f"{node.proc}/driver/nvidia/capabilities/gpu1/mig/gi7")
    assert undo() == [NOT_FOUND, NOT_FOUND]
    assert smi(node, "mig", "-i", "1", "-cgi", "19:0", "-C").returncode == 0
    assert smi(node, "-L").stdout == before


def test_who_has_asked_before_sees_what_is_made_later(
    node: SimulatedNode, smi: Smi, ask_nvml: AskNvml
) -> None:
    found = ask_nvml(
        node,
        f"""
        import subprocess
        gpu = nvmlDeviceGetHandleByIndex(1)
        old = nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
        placement = c_nvmlGpuInstancePlacement_t(6, 2)
        subprocess.run(
            ["{node.driver_root}/usr/bin/nvidia-smi", "mig", "-i", "1", "-cgi", "15:6", "-C"],
            check=True, stdout=subprocess.DEVNULL,
        )
        new = nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)
        answer([nvmlDeviceGetAttributes(each).multiprocessorCount for each in (old, new)])
        """,
    )
    assert found == [16, 26]


def test_another_scenario_has_no_instances_of_this_one(node: SimulatedNode, smi: Smi) -> None:
    assert smi(node, "mig", "-i", "1", "-cgi", "19:5", "-C").returncode == 0
    assert devices(changed_node(node, node.scenario), smi) == ["1g.10gb"]


def mode(node: SimulatedNode, smi: Smi) -> str:
    """Return the current and pending MIG mode of GPU 0."""
    query = "--query-gpu=mig.mode.current,mig.mode.pending"
    return smi(node, "-i", "0", query, "--format=csv,noheader").stdout.strip()


def test_mig_mode_is_switched_by_an_idle_gpu_alone(node: SimulatedNode, smi: Smi) -> None:
    pci = node.scenario.gpus[0].pci
    assert mode(node, smi) == "Disabled, Disabled"
    assert "Enabled MIG Mode for GPU" in smi(node, "-i", pci, "-mig", "1").stdout
    assert mode(node, smi) == "Enabled, Enabled"
    assert smi(node, "mig", "-i", "0", "-cgi", "19:2", "-C").returncode == 0
    assert devices(node, smi) == ["1g.10gb", "1g.10gb"]
    inventory = inventory_of(load_config(node.config_path), fresh=True)
    assert [gpu.mig for gpu in inventory.gpus] == [True, True]
    assert "In use by another client" in smi(node, "-i", pci, "-mig", "0").stdout
    assert mode(node, smi) == "Enabled, Disabled"
    for step in ("-dci", "-dgi"):
        assert smi(node, "mig", "-i", "0", step).returncode == 0
    assert "Disabled MIG Mode for GPU" in smi(node, "-i", pci, "-mig", "0").stdout
    assert mode(node, smi) == "Disabled, Disabled"
    with open(f"{node.state}/nvml-processes", "w", encoding="ascii") as file:
        file.write("0 4711 1048576\n")
    assert "In use by another client" in smi(node, "-i", pci, "-mig", "1").stdout
    assert mode(node, smi) == "Disabled, Enabled"


def test_mig_mode_of_ampere_waits_for_a_reset(make_node: MakeNode, smi: Smi) -> None:
    node = make_node(Scenario.parse({"gpus": 1, "model": "a100"}))
    smi(node, "-i", "0", "-mig", "1")
    assert mode(node, smi) == "Disabled, Enabled"
