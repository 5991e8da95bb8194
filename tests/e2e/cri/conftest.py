"""What tests of pods share: a containerd that serves the CRI, and pods that leave nothing."""

from __future__ import annotations

import os
import re
import tomllib
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.containerd import PrivateContainerd
from integration.cri.client import Cri
from integration.cri.plugin import CriPlugin, to_toml
from integration.images import BUSYBOX, GLIBC, PAUSE, busybox, glibc, pause, write_archive
from tests.harness.containerds import nothing_left
from tests.harness.launcher import REPOSITORY
from tests.harness.low_level import crun_for_this_host
from tests.harness.pods import Pods, import_image
from tests.harness.runtime import OURS, STOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.parts import Parts

HANDLER: Final = "runc" if os.environ.get("NVSHIM_TEST_RUNTIME") == STOCK else "nvidia"


@pytest.fixture(scope="session")
def cri_containerd(
    shim_directory: str, shim_config: str, parts: Parts, low_level: str | None, workshop: str
) -> Iterator[PrivateContainerd]:
    """The containerd of the session. Tests ask for ``pods``, which looks for leaks."""
    crun = crun_for_this_host(workshop, parts.crun)
    plugin = CriPlugin(_handlers(workshop, crun, low_level), sandbox_image=PAUSE)
    with (
        PrivateContainerd(
            shim_directory=shim_directory, shim_config=shim_config, parts=parts, cri=plugin
        ) as containerd,
        Cri(containerd.address) as cri,
    ):
        archive = write_archive(f"{containerd.directory}/pods.tar", [busybox(), glibc(), pause()])
        import_image(cri, containerd, archive, BUSYBOX, GLIBC, PAUSE)
        os.unlink(archive)
        yield containerd


@pytest.fixture
def pods(cri_containerd: PrivateContainerd) -> Iterator[Pods]:
    """Pods with the runtime under test. The test fails if anything of them is left."""
    with nothing_left(cri_containerd):
        pods = Pods(cri_containerd, HANDLER)
        yield pods
        if not cri_containerd.pid:
            cri_containerd.start()
        pods.close()


def _handlers(workshop: str, crun: str, low_level: str | None) -> dict[str, Any]:
    """The handlers: that of docs/engines.md, others of ours, and containerd's to compare."""
    with open(os.path.join(REPOSITORY, "docs/engines.md"), encoding="utf-8") as file:
        found = re.search(r"```toml\n(# /etc/containerd/config.toml.*?)```", file.read(), re.DOTALL)
    assert found is not None
    # No systemd runs where the tests do.
    text = found[1].replace("SystemdCgroup = true", "SystemdCgroup = false")
    assert text != found[1]
    plugin = tomllib.loads(text)["plugins"]["io.containerd.grpc.v1.cri"]
    handlers = plugin["containerd"]["runtimes"]
    options = {"BinaryName": crun, "Root": "", "NoPivotRoot": False, "NoNewKeyring": True}
    by_file = {"ConfigPath": _write(f"{workshop}/options.toml", options)}
    plain: dict[str, Any] = {"runtime_type": OURS}
    stock: dict[str, Any] = {"runtime_type": STOCK}
    if low_level:
        # containerd 1.6 hands on nothing else to ours.
        chosen = {"ConfigPath": _write(f"{workshop}/low-level.toml", {"BinaryName": low_level})}
        handlers["nvidia"]["options"].update(chosen)
        plain["options"] = chosen
        stock["options"] = {"BinaryName": low_level}
    return {
        **handlers,
        "plain": plain,
        "annotated": {**plain, "container_annotations": ["cdi.k8s.io/*"]},
        "crun": {"runtime_type": OURS, "options": options},
        "crun by file": {"runtime_type": OURS, "options": by_file},
        "runc": stock,
    }


def _write(path: str, options: dict[str, Any]) -> str:
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_toml(options))
    return path
