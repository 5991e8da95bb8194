"""Fixtures for pods: a containerd that serves the CRI, and pods that leave nothing."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from integration.simulated import SimulatedNode
from tests.harness.containerds import nothing_left
from tests.harness.launcher import REPOSITORY
from tests.harness.low_level import crun_for_this_host
from tests.harness.pods import Pods, containerd_for_pods
from tests.harness.runtime import OURS, STOCK
from tools.cri.plugin import CriContainerd, CriPlugin, to_toml
from tools.images import PAUSE, busybox, glibc, pause
from tools.parts import Parts

HANDLER: Final = "runc" if os.environ.get("NVSHIM_TEST_RUNTIME") == STOCK else "nvidia"


@pytest.fixture(scope="session")
def cri_containerd(
    shim_directory: str, shim_config: str, parts: Parts, low_level: str | None, workshop: str
) -> Iterator[CriContainerd]:
    """Return the session's containerd. Tests use ``pods``, which checks for leaks."""
    crun = crun_for_this_host(workshop, parts.crun)
    plugin = CriPlugin(_handlers(workshop, crun, low_level), sandbox_image=PAUSE)
    with containerd_for_pods(
        busybox(),
        glibc(),
        pause(),
        shim_directory=shim_directory,
        shim_config=shim_config,
        parts=parts,
        cri=plugin,
    ) as containerd:
        yield containerd


@pytest.fixture
def pods(cri_containerd: CriContainerd) -> Iterator[Pods]:
    """Return pods with the runtime under test. The test fails if they leave anything."""
    with nothing_left(cri_containerd):
        pods = Pods(cri_containerd, HANDLER)
        yield pods
        if not cri_containerd.pid:
            cri_containerd.start()
        pods.close()


@pytest.fixture
def gpus(pods: Pods, two_gpus: SimulatedNode, configure: Callable[..., None]) -> Pods:
    """Return pods on the node with two GPUs."""
    if not pods.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    configure(node=two_gpus)
    return pods


def _handlers(workshop: str, crun: str, low_level: str | None) -> dict[str, Any]:
    """Return the handlers: the one in docs/engines.md, more of ours, and containerd's own."""
    with open(os.path.join(REPOSITORY, "docs/engines.md"), encoding="utf-8") as file:
        found = re.search(r"```toml\n(# /etc/containerd/config.toml.*?)```", file.read(), re.DOTALL)
    assert found is not None
    # The tests run where there is no systemd.
    text = found[1].replace("SystemdCgroup = true", "SystemdCgroup = false")
    assert text != found[1]
    plugin = tomllib.loads(text)["plugins"]["io.containerd.grpc.v1.cri"]
    handlers = plugin["containerd"]["runtimes"]
    options = {"BinaryName": crun, "Root": "", "NoPivotRoot": False, "NoNewKeyring": True}
    by_file = {"ConfigPath": _write(f"{workshop}/options.toml", options)}
    plain: dict[str, Any] = {"runtime_type": OURS}
    stock: dict[str, Any] = {"runtime_type": STOCK}
    if low_level:
        # containerd 1.6 passes nothing else to our shim.
        chosen = {"ConfigPath": _write(f"{workshop}/low-level.toml", {"BinaryName": low_level})}
        handlers["nvidia"]["options"].update(chosen)
        plain["options"] = chosen
        stock["options"] = {"BinaryName": low_level}
    return {
        **handlers,
        "plain": plain,
        "annotated": {**plain, "container_annotations": ["cdi.k8s.io/*"]},
        "handing on": {**plain, "pod_annotations": ["*", "*/*"]},
        "crun": {"runtime_type": OURS, "options": options},
        "crun by file": {"runtime_type": OURS, "options": by_file},
        "runc": stock,
    }


def _write(path: str, options: dict[str, Any]) -> str:
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_toml(options))
    return path
