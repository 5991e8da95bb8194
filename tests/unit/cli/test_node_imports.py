"""The answers of the kubelet's probes of the node agent, and their cost."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from integration import exits
from integration.cli import __main__ as program
from integration.cli import app

if TYPE_CHECKING:
    from pathlib import Path

# Modules of the agent that a readiness check must not import.
HEAVY = (
    "anyio", "google.protobuf", "grpc", "hooks.engine", "integration.engines",
    "integration.node.agent", "integration.node.state.store", "structlog", "yaml",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "spared"),
    [("node --ready", (*HEAVY, "click")), ("node --ready --poll 1", HEAVY),
     ("node-exec --host /nonexistent node", HEAVY)],
)  # fmt: skip
def test_a_probe_of_the_kubelet_imports_nothing_of_the_agent(
    words: str, spared: tuple[str, ...]
) -> None:
    """A probe is two programs: the one in the pod executes the one of the node."""
    code = (
        f"import sys; sys.argv[1:] = {words.split()!r}\n"
        "from integration.cli.__main__ import main; main()\n"
        f"print(*sys.modules.keys() & {set(spared)!r})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert loaded.stdout.split() == []


# Modules that the agent imports only for non-default options, or never.
_UNWANTED = (
    "api.ttrpc", "hooks.engine", "http.client", "integration.apiserver.client",
    "integration.cri.client", "integration.engines", "prometheus_client", "pygments", "pynvml",
    "rich",
)  # fmt: skip


def test_an_agent_with_the_default_options_imports_only_what_they_need() -> None:
    """The defaults run the device plugin, without claims, metrics and an API server."""
    code = f"""
import sys
from importlib import import_module
from integration.cli import app, node, node_agent
from integration.kubelet import pod_resources_client
from integration.node.options import Options
from integration.node.service import SERVICES
from integration.node.services.plugin import serving
node_agent._log("logfmt")("info", "it starts")
for each in SERVICES.values():
    if each.is_wanted(Options()):
        import_module(each.module)
print(*sys.modules.keys() & {set(_UNWANTED)!r})
import rich.traceback
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert loaded.stdout.split() == []


@pytest.mark.parametrize("pod", ["", "b5e5d3a1-0001", "another", "../x"])
def test_a_probe_answers_what_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pod: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, state = tmp_path / "config.toml", tmp_path / "state"
    config.write_text(f'[node]\nstate = "{state}"\n')
    monkeypatch.setenv("NVSHIM_CONFIG", str(config))
    monkeypatch.setenv("POD_UID", pod)
    monkeypatch.setattr(sys, "argv", ["nvshim", "node", "--ready"])
    (state / "pods").mkdir(parents=True)
    (state / "node.json").write_text('{"poll": 60, "pid": 7}')
    found = set()
    with (state / "node.lock").open("w") as agent, (state / "pods/b5e5d3a1-0001").open("w") as own:
        print(7, file=agent, flush=True)
        fcntl.flock(own, fcntl.LOCK_EX)
        for lock in (fcntl.LOCK_UN, fcntl.LOCK_EX):
            fcntl.flock(agent, lock)
            found.add(status := program.main())
            assert status == app.main(["node", "--ready"])
    known = {"another": {exits.FOUND}, "../x": {exits.USAGE}}
    assert found == known.get(pod, {exits.OK, exits.FOUND})
    config.write_text("nonsense")
    assert program.main() == app.main(["node", "--ready"]) != exits.OK
    assert capsys.readouterr().err
