"""What tests of pods share: a containerd that serves the CRI, and pods that leave nothing."""

from __future__ import annotations

import os
import re
import tomllib
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.containerd import PrivateContainerd
from integration.cri.client import Cri
from integration.cri.plugin import CriPlugin
from integration.images import BUSYBOX, GLIBC, PAUSE, busybox, glibc, pause, write_archive
from tests.harness.launcher import REPOSITORY
from tests.harness.leaks import Census, describe
from tests.harness.pods import Pods, import_image
from tests.harness.runtime import OURS, STOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLER: Final = "runc" if os.environ.get("NVSHIM_TEST_RUNTIME") == STOCK else "nvidia"


@pytest.fixture(scope="session")
def cri_containerd(shim_directory: str, shim_config: str) -> Iterator[PrivateContainerd]:
    """The containerd of the session. Tests ask for ``pods``, which looks for leaks."""
    plugin = CriPlugin(_handlers(), sandbox_image=PAUSE)
    with (
        PrivateContainerd(
            shim_directory=shim_directory, shim_config=shim_config, cri=plugin
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
    if not cri_containerd.pid:
        cri_containerd.start()
    census = Census(cri_containerd)
    pods = Pods(cri_containerd, HANDLER)
    yield pods
    if not cri_containerd.pid:
        cri_containerd.start()
    pods.close()
    left = census.leftovers()
    if left:
        message = describe(left, cri_containerd.log())
        census.remove(left)
        pytest.fail(message, pytrace=False)


def _handlers() -> dict[str, Any]:
    """The runtime handlers: the README's own, one without options, containerd's to compare."""
    with open(os.path.join(REPOSITORY, "README.md"), encoding="utf-8") as file:
        found = re.search(r"```toml\n(# /etc/containerd/config.toml.*?)```", file.read(), re.DOTALL)
    assert found is not None
    # No systemd runs where the tests do.
    text = found[1].replace("SystemdCgroup = true", "SystemdCgroup = false")
    assert text != found[1]
    plugin = tomllib.loads(text)["plugins"]["io.containerd.grpc.v1.cri"]
    return {
        **plugin["containerd"]["runtimes"],
        "plain": {"runtime_type": OURS},
        "runc": {"runtime_type": STOCK},
    }
