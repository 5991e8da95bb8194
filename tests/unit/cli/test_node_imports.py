from __future__ import annotations

import subprocess
import sys

# What the agent needs, and who asks whether it is ready does not.
HEAVY = (
    "anyio", "google.protobuf", "grpc", "hooks.engine", "integration.engines",
    "integration.node.agent", "integration.node.board", "structlog", "yaml",
)  # fmt: skip


def test_a_probe_of_the_kubelet_imports_nothing_of_the_agent() -> None:
    """Each is two programs: one in the pod, and the one of the node that it becomes."""
    code = (
        "import sys, integration.cli.app, integration.cli.node, integration.cli.node_exec\n"
        f"print(*sys.modules.keys() & {set(HEAVY)!r})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert loaded.stdout.split() == []
