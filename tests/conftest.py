"""What tests against a real containerd share.

One containerd runs for the whole session, with the images of tools.images in it. Each
test gets a runtime of it, and fails if it leaves anything on the machine. Every test fails that
leaves its own process otherwise than it was (:mod:`tests.harness.process_guard`).

``NVSHIM_TEST_RUNTIME=io.containerd.runc.v2`` runs the tests against containerd's own shim
instead, to see that they ask for nothing that a shim does not have to do.

``NVSHIM_TEST_PARTS=trixie`` runs them with containerd, runc and crun of another release of Debian,
``trixie+sid`` with containerd of the first and runc and crun of the second; and
``NVSHIM_TEST_LOW_LEVEL=crun`` has the containers run by crun. tests/matrix.py goes through them.

``NVSHIM_TEST_SHIM=tree`` runs them with the shim of the self-contained tree that a node gets, by
its own Python, instead of the checkout's.

``NVSHIM_TEST_ORDER=SEED`` runs the files of tests in the order that the seed deals; the tests of a
file stay as they are. To see a failure again, name the seed again.

``NVSHIM_TEST_EXAMPLES=random`` looks for other examples (:mod:`tests.harness.examples`).
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from integration.simulated import SimulatedNode
from integration.tree import Tree
from shim.verbs.handover import UMASK
from tests.harness import (
    forking,  # noqa: F401 - before anything imports gRPC
    process_guard,
)
from tests.harness.containerds import containerd_with_images, nothing_left
from tests.harness.examples import load_profile
from tests.harness.launcher import REPOSITORY, make_launcher
from tests.harness.low_level import crun_for_this_host
from tests.harness.order import files_in_order
from tests.harness.own_process import restored
from tests.harness.runtime import OURS, Runtime
from tests.harness.temporary import usable_tmpdir
from tools.containerd import PrivateContainerd
from tools.images import busybox, glibc
from tools.parts import INSTALLED, Parts

load_profile()

RUNTIME: Final = os.environ.get("NVSHIM_TEST_RUNTIME", OURS)
PARTS: Final = os.environ.get("NVSHIM_TEST_PARTS", INSTALLED)
LOW_LEVEL: Final = os.environ.get("NVSHIM_TEST_LOW_LEVEL", "runc")
SHIM: Final = os.environ.get("NVSHIM_TEST_SHIM", "checkout")
ORDER: Final = os.environ.get("NVSHIM_TEST_ORDER", "")

TMPDIR: Final = pytest.StashKey[str]()
"""What was wrong with the directory of temporary files that we were given."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give workers that run side by side short directories: addresses of sockets lie in them."""
    # Not as names of this module: those hear nothing of fixtures of the session.
    config.pluginmanager.register(process_guard)
    # A shell's job in the background begins without it, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As systemd starts everything: what tests make as a distribution would has its modes. Tests of
    # another umask set it.
    os.umask(0o022)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and config.option.basetemp:
        run = os.path.dirname(config.option.basetemp)
        config.option.basetemp = os.path.join(run, worker.removeprefix("gw"))
    if not worker and os.geteuid() == 0:  # whose variable the workers have
        stack = ExitStack()
        config.stash[TMPDIR] = stack.enter_context(usable_tmpdir())
        config.add_cleanup(stack.close)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say where temporary files are, if that is not where they were asked for."""
    why = config.stash.get(TMPDIR, "")
    return f"TMPDIR: {why}" if why else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector, and what a test forks, the thousands of tests that there are."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "seed" in getattr(item, "fixturenames", ()):
            item.add_marker("seeded")
        if "e2e" in item.path.relative_to(REPOSITORY).parts:
            item.add_marker("e2e")
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="needs root"))
    if ORDER:
        items[:] = files_in_order(items, ORDER)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """The umask that shims have, and that who makes images and packages has."""
    with restored():
        os.umask(UMASK)
        yield


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory for what the whole session uses."""
    return str(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="session")
def shim_directory(workshop: str, request: pytest.FixtureRequest) -> str:
    """Where the launcher is that containerd calls: this checkout's, or that of a tree."""
    if SHIM == "tree":
        return os.path.join(request.getfixturevalue("built_tree").path, "bin")
    return os.path.dirname(make_launcher(os.path.join(workshop, "bin")))


@pytest.fixture(scope="session")
def built_tree() -> Tree:
    """The self-contained tree of this checkout, which is nobody's to change."""
    from tests.harness.dist import built  # noqa: PLC0415 - most tests need no tree

    return built()


@pytest.fixture(scope="session")
def shim_config(workshop: str) -> str:
    """The shim's configuration; ``configure`` exchanges it for one test."""
    path = os.path.join(workshop, "config.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'[node]\nstate = "{workshop}/state"\n')
    return path


@pytest.fixture
def configure(shim_config: str) -> Iterator[Callable[..., None]]:
    """Give the shim another configuration, which it reads for each container.

    That is a text, behind what the configuration of a simulated ``node`` says if there is one.
    """
    with open(shim_config, encoding="utf-8") as file:
        before = file.read()

    def write(text: str = "", *, node: SimulatedNode | None = None) -> None:
        own = ""
        if node is not None:
            with open(node.config_path, encoding="utf-8") as file:
                own = f"{file.read()}\n"
        with open(shim_config, "w", encoding="utf-8") as file:
            file.write(own + text)

    yield write
    write(before)


@pytest.fixture(scope="session")
def parts() -> Iterator[Parts]:
    """The containerd, runc and crun that are tested with. Tests' own children find them too."""
    containerd, _, low_level = PARTS.partition("+")
    parts = Parts.named(containerd, say=print)
    if low_level:
        parts = parts.with_low_level_of(Parts.named(low_level, say=print))
    with pytest.MonkeyPatch.context() as patch:
        if PARTS != INSTALLED:
            patch.setenv("PATH", parts.path, prepend=":")
        yield parts


@pytest.fixture(scope="session")
def low_level(parts: Parts, workshop: str) -> str | None:
    """What the runtimes of tests call unless told otherwise; None for the shim's default."""
    if LOW_LEVEL not in {"runc", "crun"}:
        pytest.exit(f"NVSHIM_TEST_LOW_LEVEL={LOW_LEVEL}: neither runc nor crun", returncode=2)
    return crun_for_this_host(workshop, parts.crun) if LOW_LEVEL == "crun" else None


@pytest.fixture(scope="session")
def session_containerd(
    shim_directory: str, shim_config: str, parts: Parts
) -> Iterator[PrivateContainerd]:
    """The containerd of the session. Tests ask for ``containerd``, which looks for leaks."""
    made = os.environ.get("NVSHIM_TEST_IMAGES")  # where there is no compiler to make them with
    with containerd_with_images(
        parts, made or [busybox(), glibc()], shim_directory=shim_directory, shim_config=shim_config
    ) as containerd:
        yield containerd


@pytest.fixture
def containerd(session_containerd: PrivateContainerd) -> Iterator[PrivateContainerd]:
    """A running containerd; the test fails if anything of its containers is left."""
    with nothing_left(session_containerd):
        yield session_containerd


@pytest.fixture
def runtime(containerd: PrivateContainerd, low_level: str | None) -> Iterator[Runtime]:
    """The runtime under test. Containers that a test started are removed after it."""
    runtime = Runtime(containerd, RUNTIME, low_level)
    yield runtime
    if not containerd.pid:
        containerd.start()
    runtime.close()
