"""The node agent as a process, on a simulated node that changes under it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import yaml

from integration.node.refresh import MARK
from integration.simulated import Scenario, SimulatedNode
from tests.harness.node_agent import agent_process
from tests.harness.nvshim import Answer, nvshim
from tests.harness.processes import with_nvml
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually
from tools.nodes import changed_node

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


_HEAP = 64 << 20
_NAMELESS = 5  # columns of a mapping without a file


def words_of(node: SimulatedNode, spec: str, *more: str) -> list[str]:
    return ["node", "--config", node.config_path, "--cdi-spec", spec, *more]


def call(node: SimulatedNode, spec: str, *more: str) -> Answer:
    """Run the agent for a single task, or for one that fails."""
    return nvshim(*words_of(node, spec, *more), check=False)


def agent(
    node: SimulatedNode, spec: str, *more: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    return agent_process("--config", node.config_path, "--cdi-spec", spec, *more)


def devices_of(spec: str) -> list[str]:
    try:
        with open(spec, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return []
    assert text.startswith(MARK)
    return [device["name"] for device in yaml.safe_load(text)["devices"]]


def status_of(node: SimulatedNode) -> dict[str, Any]:
    with open(f"{node.state}/node.json", encoding="utf-8") as file:
        status: dict[str, Any] = json.load(file)
    return status


def has_heaps_of_threads(pid: int) -> bool:
    """Whether glibc reserved a heap for a thread: its unused part ends at a multiple of 64 MiB."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
        rows = [line.split() for line in file]
    unused = [
        row[0].partition("-")[2] for row in rows if row[1] == "---p" and len(row) == _NAMELESS
    ]
    return any(int(end, 16) % _HEAP == 0 for end in unused)


def test_the_spec_follows_the_node(own_gpus: SimulatedNode, tmp_path: Path) -> None:
    spec = str(tmp_path / "cdi" / "nvidia.yaml")
    # No poll happens in this time: the agent reacts to events.
    with agent(own_gpus, spec, "--poll", "1000", "--log-format", "json") as process:
        eventually(lambda: "1" in devices_of(spec), "two GPUs")
        assert "2" not in devices_of(spec)
        assert os.readlink(f"{own_gpus.dev}/char/195:1") == "../nvidia1"
        os.unlink(f"{own_gpus.dev}/nvidia1")
        eventually(lambda: os.path.exists(f"{own_gpus.dev}/nvidia1"), "a missing node is recreated")
        # Stop the agent meanwhile: a real node does not vanish while the agent creates nodes.
        process.send_signal(signal.SIGSTOP)
        changed_node(own_gpus, Scenario.load("mig"))
        process.send_signal(signal.SIGCONT)
        eventually(lambda: any(":" in name for name in devices_of(spec)), "MIG")
        libraries, aside = (
            f"{own_gpus.driver_root}/usr/lib/x86_64-linux-gnu",
            f"{own_gpus.directory}/aside",
        )
        os.mkdir(aside)
        for name in os.listdir(libraries):
            if name.startswith(("libcuda.so", "libnvidia-ml.so")):
                os.rename(f"{libraries}/{name}", f"{aside}/{name}")
        eventually(lambda: not os.path.exists(spec), "no driver, no spec")
        eventually(lambda: status_of(own_gpus)["driver"] == "", "it is reported")
        assert status_of(own_gpus)["faults"][0].startswith("NVSHIM-E01")
        process.send_signal(signal.SIGSTOP)  # all of them are back when it scans
        for name in os.listdir(aside):
            os.rename(f"{aside}/{name}", f"{libraries}/{name}")
        process.send_signal(signal.SIGCONT)
        eventually(lambda: os.path.exists(spec), "its files are back, as after an update")
        eventually(lambda: status_of(own_gpus)["driver"], "it is reported")
        looks = os.stat(f"{own_gpus.state}/node.json").st_mtime_ns
        process.send_signal(signal.SIGHUP)
        eventually(
            lambda: os.stat(f"{own_gpus.state}/node.json").st_mtime_ns != looks, "a hangup: a look"
        )
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    lines = [json.loads(line) for line in said.splitlines()]
    told = [line["event"] for line in lines if line["event"].startswith("CDI")]
    assert told[0] == "CDI spec written"
    assert told[-2:] == ["CDI spec removed", "CDI spec written"]
    assert lines[-1]["event"] == "node agent stops"


def test_one_agent_per_node_and_readiness(own_gpus: SimulatedNode, tmp_path: Path) -> None:
    spec = str(tmp_path / "nvidia.yaml")
    assert call(own_gpus, spec, "--ready").code == 3
    with agent(own_gpus, spec) as process:
        eventually(lambda: call(own_gpus, spec, "--ready").code == 0, "ready")
        second = call(own_gpus, spec)
        assert second.code == 1
        assert second.stderr.startswith("NVSHIM-E2701 agent-running: ")
        assert f"process {process.pid}, " in second.stderr
        assert not has_heaps_of_threads(process.pid)
    assert call(own_gpus, spec, "--ready").code == 3


def test_a_spec_of_somebody_elses_stays(own_gpus: SimulatedNode, tmp_path: Path) -> None:
    spec = tmp_path / "nvidia.yaml"
    spec.write_text("cdiVersion: 0.5.0\n")
    once = call(own_gpus, str(spec), "--once")
    assert once.code == 3
    assert "another program owns it" in once.stderr
    assert spec.read_text() == "cdiVersion: 0.5.0\n"


def configured(node: SimulatedNode, line: str) -> None:
    with open(node.config_path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def test_a_driver_that_hangs_does_not_keep_the_agent(
    own_gpus: SimulatedNode, tmp_path: Path
) -> None:
    configured(own_gpus, "nvml-timeout = 100")
    with open(f"{own_gpus.state}/nvml-faults", "w", encoding="utf-8") as file:
        file.write("nvmlInit=hang\n")
    spec = tmp_path / "nvidia.yaml"
    with agent(own_gpus, str(spec)) as process:
        asking = eventually(lambda: with_nvml(process.pid), "a child that queries NVML")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        eventually(lambda: not any(map(is_alive, asking)), "no child holds a GPU")
    assert not spec.exists()


def test_a_file_system_that_hangs_does_not_keep_the_agent(
    own_gpus: SimulatedNode, tmp_path: Path
) -> None:
    configured(own_gpus, "nvml-timeout = 0.1")
    spec = tmp_path / "nvidia.yaml"
    os.mkfifo(spec)  # opening it waits for a writer forever
    with agent(own_gpus, str(spec)) as process:
        assert process.stderr is not None
        assert "node agent started" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_an_agent_that_cannot_say_how_it_is_goes_on_and_is_not_ready(
    own_gpus: SimulatedNode, tmp_path: Path
) -> None:
    spec = tmp_path / "nvidia.yaml"
    status = f"{own_gpus.state}/node.json"
    with agent(own_gpus, str(spec), "--poll", "0.2") as process:
        eventually(lambda: os.path.exists(status), "the first look")
        process.send_signal(signal.SIGSTOP)  # it would rewrite the file in between
        os.unlink(status)
        os.mkdir(status)
        spec.unlink()
        process.send_signal(signal.SIGCONT)
        assert process.stderr is not None
        assert next(line for line in process.stderr if "NVSHIM-E2702" in line)
        eventually(spec.exists, "the spec is rewritten")
        assert call(own_gpus, str(spec), "--ready").code == 3
        process.send_signal(signal.SIGTERM)
        assert "NVSHIM-E2702" not in process.stderr.read(), "it is reported once"
        assert process.wait(timeout=60) == 0


def test_nvml_that_does_not_answer_takes_no_mig_devices_away(tmp_path: Path) -> None:
    spec = str(tmp_path / "nvidia.yaml")
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("mig")) as node:
        libraries = f"{node.driver_root}/usr/lib/x86_64-linux-gnu"
        call(node, spec, "--once")
        before = devices_of(spec)
        assert any(":" in name for name in before)
        real = os.path.realpath(f"{libraries}/libnvidia-ml.so.1")
        os.unlink(real)
        with open(real, "wb") as file:
            file.write(b"no library")
        done = call(node, spec, "--once")
        assert done.code == 3
        assert "NVML: " in done.stderr
        assert devices_of(spec) == before
        # The plugin does not announce removed devices, though.
        os.unlink(os.path.realpath(f"{libraries}/libnvidia-ptxjitcompiler.so.1"))
        call(node, spec, "--once")
        assert devices_of(spec) != before


_OF_A_TREE = """
import sys
from integration.node import agent
agent.own_tree = lambda: sys.argv[1]
from integration.cli.app import main
sys.exit(main(sys.argv[2:]))
"""


def test_it_ends_at_once_when_another_version_is_put_into_effect(
    own_gpus: SimulatedNode, tmp_path: Path
) -> None:
    for version in ("first", "second"):
        (tmp_path / version).mkdir()
    current, spec = tmp_path / "current", str(tmp_path / "nvidia.yaml")
    current.symlink_to("first")
    words = words_of(own_gpus, spec, "--poll", "3600")
    with subprocess.Popen(
        [sys.executable, "-c", _OF_A_TREE, str(tmp_path / "first"), *words],
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            eventually(lambda: "1" in devices_of(spec), "two GPUs")
            assert process.poll() is None
            current.unlink()
            current.symlink_to("second")
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "another version was installed" in said.splitlines()[-1]
    assert "1" in devices_of(spec)


def test_an_api_server_that_does_not_answer_keeps_no_agent_from_ending(
    own_gpus: SimulatedNode, tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").touch()
    (tmp_path / "token").write_text("of the agent")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        more = ("--node-condition", "--service-account", str(tmp_path), "--api-timeout", "15")
        with agent(own_gpus, "none", *more, "--api-server", "127.0.0.1", "--api-port", port) as it:
            asked, _ = silent.accept()
            with asked:
                assert asked.recv(1), "it waits for an answer"
                it.send_signal(signal.SIGTERM)
                assert it.wait(timeout=60) == 0
