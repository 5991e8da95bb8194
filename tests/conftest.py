"""Fixtures of tests with a real containerd.

One containerd runs for the whole session, with the images of tools.images in it. Each test gets a
runtime of it, and fails if it leaves anything on the machine. A test also fails if it changes its
own process (:mod:`tests.harness.process_guard`).

``NVSHIM_TEST_RUNTIME=io.containerd.runc.v2`` runs the tests with containerd's own shim instead, to
check that they expect nothing that a shim need not do.

``NVSHIM_TEST_PARTS=trixie`` runs them with containerd, runc and crun of another Debian release,
``trixie+sid`` with containerd of the first and runc and crun of the second.
``NVSHIM_TEST_LOW_LEVEL=crun`` runs the containers with crun. tests/matrix.py tries all of these.

``NVSHIM_TEST_SHIM=tree`` runs them with the shim of the self-contained tree that a node gets, and
its own Python, instead of the checkout's.

``NVSHIM_TEST_ORDER=SEED`` shuffles the test files; the tests within a file keep their order. The
same seed repeats a failure.

``NVSHIM_TEST_EXAMPLES=random`` tries new examples (:mod:`tests.harness.examples`).
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
    """Give parallel workers short directories, because the paths of sockets in them are limited."""
    # Not as names of this module: such hooks do not see fixtures of the session.
    config.pluginmanager.register(process_guard)
    # A background job of a shell ignores SIGINT, and so would every process that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The umask of systemd's services: files that tests create as a distribution would get the usual
    # modes. Tests of another umask set it.
    os.umask(0o022)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and config.option.basetemp:
        run = os.path.dirname(config.option.basetemp)
        config.option.basetemp = os.path.join(run, worker.removeprefix("gw"))
    if not worker and os.geteuid() == 0:  # workers inherit its variable
        stack = ExitStack()
        config.stash[TMPDIR] = stack.enter_context(usable_tmpdir())
        config.add_cleanup(stack.close)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Report the directory of temporary files if it is not the one of TMPDIR."""
    why = config.stash.get(TMPDIR, "")
    return f"TMPDIR: {why}" if why else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the thousands of collected tests from garbage collection, also in forked children."""
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
    """Set the umask that shims, image builders and package builders have."""
    with restored():
        os.umask(UMASK)
        yield


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory for files of the whole session."""
    return str(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="session")
def shim_directory(workshop: str, request: pytest.FixtureRequest) -> str:
    """Return the directory of the launcher that containerd calls: this checkout's, or a tree's."""
    if SHIM == "tree":
        return os.path.join(request.getfixturevalue("built_tree").path, "bin")
    return os.path.dirname(make_launcher(os.path.join(workshop, "bin")))


@pytest.fixture(scope="session")
def built_tree() -> Tree:
    """Return the self-contained tree of this checkout. Tests share it and must not change it."""
    from tests.harness.dist import built  # noqa: PLC0415 - most tests need no tree

    return built()


@pytest.fixture(scope="session")
def shim_config(workshop: str) -> str:
    """Return the path of the shim's configuration; ``configure`` replaces it for one test."""
    path = os.path.join(workshop, "config.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'[node]\nstate = "{workshop}/state"\n')
    return path


@pytest.fixture
def configure(shim_config: str) -> Iterator[Callable[..., None]]:
    """Give the shim another configuration, which it reads for each container.

    The text follows the configuration of the simulated ``node``, if there is one.
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
    """Return the containerd, runc and crun under test, and put them in PATH for children."""
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
    """Return the default low-level runtime of tests; None for the shim's default."""
    if LOW_LEVEL not in {"runc", "crun"}:
        pytest.exit(f"NVSHIM_TEST_LOW_LEVEL={LOW_LEVEL}: must be runc or crun", returncode=2)
    return crun_for_this_host(workshop, parts.crun) if LOW_LEVEL == "crun" else None


@pytest.fixture(scope="session")
def session_containerd(
    shim_directory: str, shim_config: str, parts: Parts
) -> Iterator[PrivateContainerd]:
    """Run the containerd of the session. Tests use ``containerd``, which checks for leaks."""
    made = os.environ.get("NVSHIM_TEST_IMAGES")  # on machines without a compiler
    with containerd_with_images(
        parts, made or [busybox(), glibc()], shim_directory=shim_directory, shim_config=shim_config
    ) as containerd:
        yield containerd


@pytest.fixture
def containerd(session_containerd: PrivateContainerd) -> Iterator[PrivateContainerd]:
    """Return a running containerd; the test fails if anything of its containers is left."""
    with nothing_left(session_containerd):
        yield session_containerd


@pytest.fixture
def runtime(containerd: PrivateContainerd, low_level: str | None) -> Iterator[Runtime]:
    """Return the runtime under test. Containers that a test started are removed after it."""
    runtime = Runtime(containerd, RUNTIME, low_level)
    yield runtime
    if not containerd.pid:
        containerd.start()
    runtime.close()
