"""The installer's steps in a node's root, with stand-ins that log their arguments.

The tree's ``nvshim`` is a script here with the same effects as the real one, so that every order
and every failure can be tested quickly. tests/e2e/kubernetes uses the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from api.proto import cri_pb2 as pb
from integration.cri.engine import Engine
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE
from integration.install_layout import STAGING
from integration.kubernetes import installer
from integration.kubernetes.errors import HostUnusable, InstallerRunning
from integration.kubernetes.host import Host
from integration.kubernetes.installer import Installer
from integration.kubernetes.settings import Settings
from integration.kubernetes.status import FILE, Log, State, probe
from integration.tree import read_tree
from shim import PROGRAM, RUNTIME_NAME, VERSION
from tests.harness.launcher import REPOSITORY
from tests.harness.nvshim import nvshim
from tests.harness.raising import raises
from tests.harness.waiting import eventually
from tools.dist.manifest import write_tree
from tools.images import busybox, unpack

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="chroot(2) is root's")

PREFIX = "/opt/containerd-shim-nvidia"
BINDIR = "/usr/local/bin"
CONFIG = "/etc/containerd/config.toml"

# Scripts with those effects of the real programs that the installer checks.
_NVSHIM = r"""#!/bin/sh
tree=$(readlink -f "$0"); tree=${tree%/bin/nvshim}
echo "$*" >>/var/log/asked
[ -e /fail ] && grep -q "^$1" /fail && { echo '{"error": {"code": "NVSHIM-E9", "name": "told-to",
  "asked": "a", "found": "it has to fail", "do": "nothing"}}' >&2; exit 1; }
[ -e /hang ] && grep -q "^$1" /hang && {
  mktemp -d "$TMPDIR/XXXXXX" >/dev/null; echo $$ >/hung; sleep 1000; }
case $1 in
install)
  name=VERSION-$(sed -n 's/.*"digest": "\(........\).*/\1/p' "$tree/tree.json")
  if [ -e /opt/containerd-shim-nvidia/$name/damaged ]; then name=$name.2; fi
  [ -d /opt/containerd-shim-nvidia/$name ] || cp -a "$tree" /opt/containerd-shim-nvidia/$name
  changed=false
  [ -e /usr/local/bin/containerd-shim-nvidia-v1 ] || changed=true
  [ "$(readlink /opt/containerd-shim-nvidia/current)" = $name ] || changed=true
  ln -sfn $name /opt/containerd-shim-nvidia/current
  ln -sf /opt/containerd-shim-nvidia/current/bin/containerd-shim-nvidia-v1 /usr/local/bin/
  echo "{\"changed\": $changed}" ;;
configure)
  changed=false
  case "$*" in
  *--remove*) sed -i '/ours/d' /etc/containerd/config.toml ;;
  *) grep -qs ours /etc/containerd/config.toml || {
       echo '# ours' >>/etc/containerd/config.toml; changed=true; } ;;
  esac
  echo "{\"files\": [], \"changed\": $changed}" ;;
config)
  [ $2 != validate ] || { [ ! -e /later-key ] || grep -q '^# later$' "$0" || {
    echo '{"valid": false, "error": {"message": "unknown key later"}}'; exit 3; }
    echo '{"valid": true, "error": null}'; exit; }
  echo "$4" >/etc/containerd-shim-nvidia.root; echo '{}' ;;
uninstall) rm -rf /opt/containerd-shim-nvidia/0* /opt/containerd-shim-nvidia/current
  rm -f /usr/local/bin/containerd-shim-nvidia-v1; echo '{"complete": false}'; exit 3 ;;
esac
""".replace("VERSION", VERSION)
_SHIM = "#!/bin/sh\n[ ! -e /no-shim ] || { echo 'cannot execute' >&2; exit 126; }\n"


class Node:
    """A node's root, and the tree of the installer's image."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "node"
        self.tree = directory / "tree"
        self.local = directory / "local"
        unpack(busybox().tree, str(self.root))
        for path in ("etc/containerd", "var/log", "usr/local/bin", "opt"):
            (self.root / path).mkdir(parents=True)
        self.path(CONFIG).write_text("version = 2\n")
        self.plug("0000:17:00.0", "0x10de", "0x030200")
        (self.tree / "bin").mkdir(parents=True)
        self.release("first")

    def plug(self, bus_id: str, vendor: str, class_: str) -> None:
        """Add a device to the node's PCI bus, as sysfs shows it."""
        device = self.path(f"/sys/devices/pci0000:00/{bus_id}")
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{class_}\n")
        bus = self.path("/sys/bus/pci/devices")
        bus.mkdir(parents=True, exist_ok=True)
        (bus / bus_id).symlink_to(f"../../../devices/pci0000:00/{bus_id}")

    def unplug(self) -> None:
        """Remove every device from the bus."""
        for link in self.path("/sys/bus/pci/devices").iterdir():
            link.unlink()

    def release(self, what: str) -> None:
        """Release another version of the image's tree."""
        programs = {"nvshim": _NVSHIM, "containerd-shim-nvidia-v1": _SHIM}
        for name, text in programs.items():
            program = self.tree / "bin" / name
            program.write_text(text + f"# {what}\n")
            program.chmod(0o755)
        write_tree(
            str(self.tree), version=VERSION, revision="", architecture="amd64", python="3.11"
        )

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    @property
    def asked(self) -> list[str]:
        """Return the first arguments of each call of nvshim."""
        log = self.path("/var/log/asked")
        if not log.exists():
            return []
        return [" ".join(line.split()[:1]) for line in log.read_text().splitlines()]

    @property
    def calls(self) -> str:
        return self.path("/var/log/asked").read_text()

    def settings(self, **fields: Any) -> Settings:
        fields = {"once": True, "interval": 0.05, "engine": "containerd", **fields}
        return Settings(host=str(self.root), tree=str(self.tree), local=str(self.local), **fields)

    def run(self, **fields: Any) -> None:
        settings = self.settings(**fields)
        with Host(settings.host) as host:
            Installer(settings, host, Log()).run()

    @property
    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads((self.local / FILE).read_text())
        except FileNotFoundError:
            return {"state": None}
        on_node = self.path(f"/run/containerd-shim-nvidia/{FILE}")
        assert json.loads(on_node.read_text())["version"] == status["version"]
        return status

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        """Start the installer as its own process, configured by variables."""
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self.local)],
            cwd=REPOSITORY,
            env={
                "PATH": os.environ["PATH"], "HOST_ROOT_MOUNT": str(self.root),
                "NVSHIM_TREE": str(self.tree), "NVSHIM_INTERVAL": "0.05", **environment,
            },
            stderr=subprocess.PIPE,
        )  # fmt: skip


# Like the command, with another path of the probes.
_PROGRAM = """
import sys
from integration.kubernetes import settings
settings.Settings.__init__.__defaults__ = tuple(
    sys.argv[1] if value == settings.LOCAL else value
    for value in settings.Settings.__init__.__defaults__
)
from integration.cli.app import main
sys.exit(main(["node-installer"]))
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def running(node: Node) -> Iterator[Any]:
    """Return a function that starts installers; kill those that still run at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        started.append(node.start(**environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _is_at_rest(node: Node) -> None:
    """Wait for the second check, which follows one that has changed something."""
    eventually(lambda: len(node.asked) >= 4, "it has looked again")
    eventually(lambda: node.status["state"] == State.READY, "it is ready")


def test_the_tree_is_installed_and_the_engine_configured(node: Node) -> None:
    node.run()
    tree = read_tree(str(node.tree))
    assert os.readlink(node.path(PREFIX) / "current") == tree.name
    assert "# ours" in node.path(CONFIG).read_text()
    assert node.calls.splitlines() == [
        f"install --prefix {PREFIX} --bindir {BINDIR} --no-self-test --keep 1000 --output json",
        "configure containerd --runtime-name nvidia --restart none --output json",
    ]
    assert not (node.path(PREFIX) / STAGING).exists()
    # Without an engine to query, it is unknown whether it has to be restarted.
    assert (node.status["state"], node.status["restart_outstanding"]) == (State.READY, None)


def test_a_node_without_a_gpu_is_left_alone_until_it_has_one(node: Node, running: Any) -> None:
    node.unplug()
    # A NIC of NVIDIA, another vendor's GPU, and a bridge of NVIDIA.
    node.plug("0000:03:00.0", "0x15b3", "0x020700")
    node.plug("0000:04:00.0", "0x1002", "0x038000")
    node.plug("0000:05:00.0", "0x10de", "0x068000")
    before = sorted(os.listdir(node.path("/opt")))
    running(RUNTIME="containerd")
    eventually(lambda: node.status["state"] == State.NO_GPU, "it says that there is none")
    assert probe("ready", str(node.local), time.monotonic()).message == "no NVIDIA GPU on this node"
    assert node.asked == []
    assert sorted(os.listdir(node.path("/opt"))) == before
    node.plug("0000:18:00.0", "0x10de", "0x030000")
    _is_at_rest(node)
    # The installation is kept when the GPU disappears, since a pod may run.
    node.unplug()
    node.path(f"{BINDIR}/{PROGRAM}").unlink()
    eventually(node.path(f"{BINDIR}/{PROGRAM}").is_symlink, "it is put back")
    assert node.status["state"] != State.NO_GPU


def test_of_a_node_without_a_gpu_nothing_is_taken_back(node: Node, running: Any) -> None:
    node.unplug()
    process = running(RUNTIME="containerd", NVSHIM_REMOVE_ON_EXIT="true")
    eventually(lambda: node.status["state"] == State.NO_GPU, "it says that there is none")
    process.terminate()
    assert process.wait(30) == 0
    assert node.asked == []
    assert not node.path(PREFIX).exists()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/dev/dxg", ""),
        ("/etc/nv_tegra_release", ""),
        ("/sys/devices/soc0/family", "Tegra\n"),
        ("/proc/driver/nvidia/version", "NVRM version: …\n"),
    ],
)
def test_a_gpu_may_be_elsewhere_than_on_the_bus(node: Node, path: str, text: str) -> None:
    node.unplug()
    node.run()
    assert node.status["state"] == State.NO_GPU
    node.path(path).parent.mkdir(parents=True, exist_ok=True)
    node.path(path).write_text(text)
    node.run()
    assert node.status["state"] == State.READY


def test_every_node_is_set_up_if_that_is_asked(node: Node) -> None:
    node.unplug()
    node.run(every_node=True)
    assert node.status["state"] == State.READY
    assert node.path(f"{BINDIR}/{PROGRAM}").is_symlink()


def test_a_program_of_the_node_is_not_awaited_where_there_is_no_gpu(node: Node) -> None:
    """The agent's probe succeeds, so that its DaemonSet is ready; a Job reports the problem."""
    words = ["node-exec", "--host", str(node.root)]
    node.unplug()
    assert nvshim(*words, "--without-gpu=succeed", "--", "node", "--ready").code == 0
    failed = nvshim(*words, "--without-gpu=fail", "--", "verify", check=False)
    assert (failed.code, "NVSHIM-E2667" in failed.stderr) == (1, True)
    node.run(every_node=True)
    assert nvshim(*words, "--without-gpu=succeed", "--", "install").code == 0
    assert node.calls.splitlines()[-1] == "install"


def test_each_wish_becomes_an_option(node: Node) -> None:
    node.run(
        set_default=True, enable_cdi=True, restart="systemd", config="/etc/x.toml",
        drop_in="/etc/y.toml", runtime_name="gpu", driver_root="/run/nvidia/driver", self_test=True,
    )  # fmt: skip
    install, config, configure = node.calls.splitlines()
    assert "--no-self-test" not in install
    assert "--keep" not in install
    assert config.startswith("config set node.driver-root /run/nvidia/driver")
    for words in ("--restart systemd", "--config /etc/x.toml", "--drop-in /etc/y.toml",
                  "--runtime-name gpu", "--set-default", "--enable-cdi"):  # fmt: skip
        assert words in configure
    node.run(set_default=False, enable_cdi=False)
    assert "--no-set-default --no-enable-cdi" in node.calls.splitlines()[-1]
    node.run(runtime_type=RUNTIME_TYPE)
    assert f"--runtime-type {RUNTIME_TYPE} --output" in node.calls.splitlines()[-1]
    node.run(runtime_type=RUNC_TYPE, bindir="/opt/bin")
    words = f"--runtime-type {RUNC_TYPE} --shim /opt/bin/{PROGRAM}"
    assert words in node.calls.splitlines()[-1]
    node.run(engine="crio", bindir="/opt/bin")
    assert f"--shim /opt/bin/{PROGRAM}" in node.calls.splitlines()[-1]


def test_an_engine_that_is_to_be_left_alone_is(node: Node) -> None:
    node.run(engine="")
    assert node.asked == ["install"]


def test_a_tree_that_is_installed_is_not_copied_again(node: Node) -> None:
    node.run()
    before = node.path(PREFIX).stat().st_mtime_ns
    node.run()
    assert node.path(PREFIX).stat().st_mtime_ns != 0
    assert node.asked == ["install", "configure"] * 2
    assert len(list(node.path(PREFIX).iterdir())) == 2, before
    node.release("second")
    node.run()
    assert os.readlink(node.path(PREFIX) / "current") == read_tree(str(node.tree)).name


@pytest.mark.parametrize("name", ["bin/nvshim", "bin/containerd-shim-nvidia-v1", "tree.json"])
def test_an_installed_tree_that_is_damaged_is_no_source_of_another(node: Node, name: str) -> None:
    node.run()
    tree = read_tree(str(node.tree)).name
    _damage(node, name)
    node.run()
    assert node.status["state"] == State.READY
    assert os.readlink(node.path(PREFIX) / "current") == f"{tree}.2"
    assert not (node.path(PREFIX) / STAGING).exists()


def _damage(node: Node, name: str) -> None:
    current = node.path(PREFIX) / os.readlink(node.path(PREFIX) / "current")
    (current / name).write_text("#!/bin/false\n")
    (current / "damaged").touch()


def test_a_tree_that_is_damaged_does_not_keep_everything_from_being_taken_back(
    node: Node, running: Any
) -> None:
    process = running(NVSHIM_REMOVE_ON_EXIT="1")
    eventually(lambda: node.status["state"] == State.READY, "it is ready")
    _is_at_rest(node)
    _damage(node, "bin/nvshim")
    process.terminate()
    assert process.wait(60) == 0
    assert "# ours" not in node.path(CONFIG).read_text()
    assert not node.path(PREFIX).exists()


def test_a_shim_that_does_not_run_on_the_node_is_never_in_effect(node: Node) -> None:
    node.run()
    before = os.readlink(node.path(PREFIX) / "current")
    node.release("second")
    node.path("/no-shim").touch()
    with pytest.raises(Exception, match="cannot execute"):
        node.run()
    assert os.readlink(node.path(PREFIX) / "current") == before
    assert node.asked == ["install", "configure"]
    assert node.status["state"] == State.FAILED
    assert not (node.path(PREFIX) / STAGING).exists()


def test_a_version_that_cannot_read_the_configuration_is_not_switched_to(node: Node) -> None:
    node.release("later")
    node.run()
    before = os.readlink(node.path(PREFIX) / "current")
    node.path("/later-key").touch()
    node.release("earlier")
    with pytest.raises(Exception, match="unknown key later") as caught:
        node.run()
    assert "NVSHIM-E2664" in str(caught.value)
    assert os.readlink(node.path(PREFIX) / "current") == before
    assert node.status["state"] == State.FAILED
    # The key is removed.
    node.path("/later-key").unlink()
    node.run()
    assert os.readlink(node.path(PREFIX) / "current") != before
    # The version in effect cannot read it either: nothing gets worse.
    node.path("/later-key").touch()
    node.release("even earlier")
    node.run()
    assert node.status["state"] == State.READY


@pytest.mark.parametrize("step", ["install", "config", "configure"])
def test_a_step_that_fails_is_quoted_and_can_be_done_again(node: Node, step: str) -> None:
    node.path("/fail").write_text(f"{step}\n")
    with pytest.raises(Exception, match="it has to fail") as caught:
        node.run(driver_root="/")
    assert "NVSHIM-E2664" in str(caught.value)
    assert node.status["state"] == State.FAILED
    node.path("/fail").unlink()
    node.run(driver_root="/")
    assert node.status["state"] == State.READY


def test_one_installer_works_on_a_node(node: Node, running: Any) -> None:
    first = running()
    eventually(lambda: node.status["state"] == State.READY, "the first is ready")
    lock = node.path("/run/nvidia/toolkit/toolkit.pid")
    assert lock.read_text() == f"{first.pid}\n"
    _is_at_rest(node)
    asked = node.asked
    with raises(InstallerRunning, match=str(first.pid)):
        node.run()
    second = running()
    _, said = second.communicate(timeout=60)
    assert second.returncode == 1
    assert b"NVSHIM-E2660 installer-running" in said
    assert node.asked == asked
    assert node.status["state"] == State.READY
    first.kill()  # its lock ends with it
    first.wait()
    node.run()


def test_the_driver_is_awaited_and_its_root_taken(node: Node, running: Any) -> None:
    running(NVSHIM_WAIT_FOR_DRIVER="true", NVSHIM_TOOLKIT_READY="true")
    eventually(lambda: node.status["state"] == State.WAITING, "it waits")
    assert node.asked == []
    ready = node.path("/run/nvidia/validations/driver-ready")
    ready.parent.mkdir(parents=True)
    ready.write_text("IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\n")
    eventually(lambda: node.status["state"] == State.READY, "it is ready")
    assert node.path("/etc/containerd-shim-nvidia.root").read_text() == "/run/nvidia/driver\n"
    assert node.status["driver_root"] == "/run/nvidia/driver"
    assert (ready.parent / "toolkit-ready").exists()


def test_a_driver_that_does_not_come_is_not_awaited_for_ever(node: Node) -> None:
    with pytest.raises(Exception, match="driver-not-ready"):
        node.run(wait_for_driver=True, driver_timeout=0.1)
    assert node.asked == []


def test_what_another_tool_takes_away_is_put_back_and_then_later_each_time(
    node: Node, running: Any
) -> None:
    process = running()
    eventually(lambda: node.status["state"] == State.READY, "it is ready")
    _is_at_rest(node)
    config = node.path(CONFIG)
    config.write_text("version = 2\n# theirs\n")
    eventually(lambda: "# ours" in config.read_text(), "it is put back")
    eventually(lambda: node.status["reasserted"] == 1, "it is counted")
    asked = len(node.asked)
    config.write_text("version = 2\n# theirs again\n")
    time.sleep(0.5)  # ten checks
    assert "# ours" not in config.read_text()
    assert len(node.asked) == asked
    process.terminate()
    assert process.wait(60) == 0


def test_an_engine_is_asked_after_its_restart_also_while_another_tool_is_left_alone(
    node: Node, running: Any
) -> None:
    with _Engine(node, "nvidia", "runc"):
        running()
        eventually(lambda: node.status.get("restart_outstanding") is False, "the engine was asked")
        _is_at_rest(node)
        config = node.path(CONFIG)
        config.write_text("version = 2\n# theirs\n")
        eventually(lambda: node.status["reasserted"] == 1, "it is put back")
        eventually(lambda: node.status["state"] == State.READY, "it is ready again")
        asked = len(node.asked)
        config.write_text("version = 2\n# theirs again\n")
    # The other tool restarts the engine, which then lacks our handler.
    with _Engine(node, "runc"):
        eventually(lambda: node.status["state"] == State.RESTART, "the node is not ready")
    assert "# ours" not in config.read_text()
    assert len(node.asked) == asked


class _Engine:
    """Answers the CRI's Status as containerd does, with some handlers."""

    def __init__(self, node: Node, *handlers: str) -> None:
        directory = node.path("/run/containerd")
        directory.mkdir(parents=True, exist_ok=True)
        # Through a descriptor, since the path of a test's directory is too long for a socket.
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._socket = directory / "containerd.sock"
        runtimes = {
            name: {"runtimeType": RUNTIME_NAME if name == "nvidia" else "io.containerd.runc.v2"}
            for name in handlers
        }
        answer = pb.StatusResponse(
            info={"config": json.dumps({"containerd": {"runtimes": runtimes}})},
            runtime_handlers=[pb.RuntimeHandler(name=name) for name in handlers],
        )
        self._workers = ThreadPoolExecutor(max_workers=2)
        self._server = grpc.server(self._workers)
        version = pb.VersionResponse(runtime_name="containerd", runtime_version="2.1.9")
        methods = {
            name: grpc.unary_unary_rpc_method_handler(lambda *_, said=said: said)
            for name, said in (
                ("Status", answer.SerializeToString()), ("Version", version.SerializeToString()),
            )
        }  # fmt: skip
        service = grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", methods)
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix:/proc/self/fd/{self._directory}/containerd.sock")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._workers.shutdown()
        self._socket.unlink(missing_ok=True)
        os.close(self._directory)


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ([ConnectionError("not yet"), True], State.READY),
        ([ConnectionError("not yet"), False], State.RESTART),
        ([None], State.READY),
    ],
)
def test_an_engine_that_does_not_answer_yet_is_asked_again_before_anybody_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch, answers: list[Any], state: str
) -> None:
    socket = node.path("/run/containerd/containerd.sock")
    socket.parent.mkdir(parents=True)
    socket.touch()
    ready = node.path("/run/nvidia/validations/toolkit-ready")
    states = []

    def ask(_: object) -> Engine | None:
        states.append((node.status["state"], ready.exists()))
        answer = answers[len(states) - 1]
        if isinstance(answer, ConnectionError):
            raise answer
        if answer is None:
            return None
        return Engine("cri-o", "1.30.0", handlers=("nvidia",) if answer else ("runc",))

    monkeypatch.setattr(installer, "query_engine", ask)
    monkeypatch.setattr(installer, "_POLL", 0.01)
    node.run(toolkit_ready=True)
    waiting = [(State.ENGINE, False)] * (len(answers) - 1)
    assert states == [(State.CONFIGURING, False), *waiting]
    assert (node.status["state"], ready.exists()) == (state, state == State.READY)


def test_what_a_killed_installer_has_said_is_not_believed_of_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.run()
    assert node.status["state"] == State.READY
    said: list[dict[str, Any]] = []

    def look(_: Installer) -> str:
        said.append(node.status)
        return ""

    monkeypatch.setattr(Installer, "_driver_root", look)
    node.run()
    assert said[0]["state"] == State.STARTING


def test_a_change_that_takes_nothing_away_is_no_fight(node: Node, running: Any) -> None:
    running()
    eventually(lambda: node.status["state"] == State.READY, "it is ready")
    _is_at_rest(node)
    for number in range(3):
        asked = len(node.asked)
        with node.path(CONFIG).open("a") as file:
            file.write(f"# {number}\n")
        eventually(lambda asked=asked: len(node.asked) >= asked + 2, "it looked")  # type: ignore[misc]
    assert node.status["reasserted"] == 0


def test_a_link_that_is_removed_is_put_back(node: Node, running: Any) -> None:
    running()
    eventually(lambda: node.status["state"] == State.READY, "it is ready")
    link = node.path("/usr/local/bin/containerd-shim-nvidia-v1")
    link.unlink()
    eventually(lambda: os.path.islink(link), "the link is there again")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_leaves_everything_when_it_is_told_to_end(node: Node, running: Any, number: int) -> None:
    process = running()
    eventually(lambda: node.status["state"] == State.READY, "it is ready")
    process.send_signal(number)
    assert process.wait(60) == 0
    assert set(node.asked) == {"install", "configure"}
    assert node.status["state"] == State.ENDED
    assert (node.path(PREFIX) / "current").exists()
    assert node.path("/run/nvidia/toolkit/toolkit.pid").read_text() == ""


def test_it_takes_everything_back_if_that_was_asked(node: Node, running: Any) -> None:
    process = running(NVSHIM_REMOVE_ON_EXIT="1", NVSHIM_TOOLKIT_READY="1")
    eventually(lambda: node.status["state"] == State.READY, "it is ready")
    ready = node.path("/run/nvidia/validations/toolkit-ready")
    assert ready.exists()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # once is enough
    assert process.wait(60) == 0
    assert node.asked[-2:] == ["configure", "uninstall"]
    assert "--remove" in node.calls.splitlines()[-2]
    assert not ready.exists()
    assert list(node.path(PREFIX).iterdir()) == []


def test_a_toolkit_ready_of_another_is_left_to_it(node: Node, running: Any) -> None:
    ready = node.path("/run/nvidia/validations/toolkit-ready")
    ready.parent.mkdir(parents=True)
    ready.touch()
    process = running(NVSHIM_REMOVE_ON_EXIT="1", NVSHIM_TOOLKIT_READY="1")
    eventually(lambda: node.status["state"] == State.READY, "it is ready")
    process.terminate()
    process.wait(60)
    assert ready.read_text() == ""


@pytest.mark.parametrize("step", ["install", "configure"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_middle_of_a_step_it_is_simply_started_again(
    node: Node, running: Any, step: str, number: int
) -> None:
    hang = node.path("/hang")
    hang.write_text(f"{step}\n")
    process = running()
    hung = node.path("/hung")
    eventually(hung.exists, f"{step} hangs")
    child = int(eventually(hung.read_text, "its process is known"))
    process.send_signal(number)
    assert process.wait(60) == (0 if number == signal.SIGTERM else -number)
    hang.unlink()
    if number == signal.SIGTERM:  # its children end with it
        eventually(lambda: not os.path.exists(f"/proc/{child}"), "the step has ended")
    else:
        os.killpg(child, signal.SIGKILL)
    node.run()
    assert node.status["state"] == State.READY
    assert sorted(os.listdir(node.path(PREFIX))) == sorted(
        ["current", read_tree(str(node.tree)).name]
    )
    # The temporary files of the step are gone as well.
    assert os.listdir(node.path("/run/containerd-shim-nvidia")) == [FILE]


def test_what_a_killed_copy_has_left_is_replaced(node: Node) -> None:
    left = node.path(PREFIX) / STAGING / "bin"
    left.mkdir(parents=True)
    (left / "nvshim").write_text("#!/bin/sh\nexit 1\n")
    (left / "half").touch()
    node.run()
    assert not left.exists()
    assert not list(node.path(PREFIX).glob("0*/bin/half"))


def test_links_of_the_node_lead_to_places_of_the_node(node: Node) -> None:
    # For example, /opt and /run/nvidia may be absolute links to other directories.
    node.path("/opt").rmdir()
    node.path("/var/opt").mkdir()
    node.path("/opt").symlink_to("/var/opt")
    node.path("/elsewhere").mkdir()
    node.path("/run/nvidia").symlink_to("/elsewhere")
    node.run()
    assert node.path("/var/opt/containerd-shim-nvidia/current").is_symlink()
    assert node.path("/elsewhere/toolkit/toolkit.pid").exists()
    assert not os.path.exists("/elsewhere")


def test_a_file_of_ours_that_is_a_link_is_not_followed(node: Node) -> None:
    victim = node.path("/victim")
    victim.write_text("as it was")
    directory = node.path("/run/nvidia/toolkit")
    directory.mkdir(parents=True)
    (directory / "toolkit.pid").symlink_to("/victim")
    with pytest.raises(HostUnusable):
        node.run()
    (directory / "toolkit.pid").unlink()
    state = node.path("/run/containerd-shim-nvidia")
    state.mkdir()
    (state / FILE).symlink_to("/victim")
    (state / f".{FILE}.new").symlink_to("/victim")
    node.run()
    assert victim.read_text() == "as it was"
    assert not (state / FILE).is_symlink()


def test_a_root_that_is_not_there_is_one_typed_error(tmp_path: Path) -> None:
    with pytest.raises(HostUnusable, match="HOST_ROOT_MOUNT"):
        Host(str(tmp_path / "missing"))
