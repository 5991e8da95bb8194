"""A throw-away view of this machine in which the documentation's commands can run.

The commands of a page are meant for a node: they write to /etc, /opt and /usr/local, start
containerd with its usual paths, and install software. So they run in their own mount and pid
namespaces: tmpfs overlays cover those directories, /run and containerd's are empty, and everything
disappears with the first process. The kernel, /dev and cgroups are those of this machine.

What a world has
- Debian's containerd and runc, as installed here, with Debian's configuration; containerd runs. It
  has no settings of other engines, and nothing of ours that is installed on this machine.
- Two simulated GPUs, which the [node] table of the shim's configuration names. A node with real
  GPUs needs no such table.
- Its own containerd namespace, so that its cgroups can be told apart from others.
- A stand-in for ``systemctl``, which starts and stops containerd and rejects anything else.
- The output of ``make dist``, in the current directory.
- An image with glibc under the name that pages use, as if it had been pulled.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from typing import Final, Self

from integration.simulated import SimulatedNode
from integration.simulated.packages import default_cache
from integration.timeouts import PATIENCE
from tests.harness.bare_root import FORGET_OTHERS
from tests.harness.etc_containerd import DEBIAN
from tests.harness.pages import Command
from tools.images import glibc, write_archive

__all__ = ["Ended", "World", "matches", "write_image"]

IMAGE: Final = "docker.io/library/ubuntu:24.04"

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TIMEOUT: Final = 40.0 * PATIENCE

# Run as the first process of the namespaces. $1 is a directory of ours, $2 that of packages.
_SET_UP: Final = (
    f"""
set -eu
{FORGET_OTHERS}
"""
    r"""
base=$1
mount -t tmpfs -o mode=755 world "$base/cover"
cd "$base/cover"
for name in etc opt usr/bin usr/local var/lib var/cache root; do
    [ -d "/$name" ] || continue
    mkdir -p "upper/$name" "work/$name"
    mount -t overlay overlay -o "lowerdir=/$name,upperdir=upper/$name,workdir=work/$name" "/$name"
done
mount -t tmpfs -o mode=755 run /run
mkdir /run/lock
# An overlay cannot lie on an overlay; and layers are on the file system of snapshots.
for name in containerd containerd-shim-nvidia; do
    mkdir -p "own/$name" "/var/lib/$name"
    mount --bind "own/$name" "/var/lib/$name"
done
# The packages of the simulated driver, as after a first download.
mkdir -p upper/packages work/packages /var/cache/containerd-shim-nvidia/packages
mount -t overlay overlay -o "lowerdir=$2,upperdir=upper/packages,workdir=work/packages" \
    /var/cache/containerd-shim-nvidia/packages
rm -rf /opt/containerd-shim-nvidia /etc/containerd-shim-nvidia /etc/nvidia-container-runtime \
    /etc/cdi /etc/containerd /etc/docker /etc/crio
for name in nvshim containerd-shim-nvidia-v1; do rm -f /usr/bin/$name /usr/local/bin/$name; done
find /etc/systemd \( -name 'nvshim-*' -o -name 'containerd-shim-nvidia*' \) -exec rm -rf {} +
mkdir -p /etc/containerd-shim-nvidia /etc/containerd /usr/local/sbin
cp "$base/config.toml" /etc/containerd-shim-nvidia/config.toml
cp "$base/containerd.toml" /etc/containerd/config.toml
cp "$base/systemctl" /usr/local/sbin/systemctl
cd /root
for name in "$base"/files/*; do [ ! -e "$name" ] || ln -s "$name" .; done
systemctl start containerd
ctr images import "$base/image.tar" >/dev/null
exec bash --norc --noprofile
"""
)

_SYSTEMCTL: Final = r"""#!/bin/sh
# Stands in for systemd, which does not run here: it starts and stops containerd.
set -eu
log=/var/lib/containerd.log pid=/run/containerd.pid
stop() {
    [ -e $pid ] || return 0
    kill "$(cat $pid)" 2>/dev/null || :
    while kill -0 "$(cat $pid)" 2>/dev/null; do sleep 0.02; done
    rm -f $pid
}
start() {
    setsid containerd >>$log 2>&1 </dev/null &
    echo $! >$pid
    for _ in $(seq 500); do
        if ctr version >/dev/null 2>&1; then return 0; fi
        sleep 0.02
    done
    tail -n 5 $log >&2
    return 1
}
case "$*" in
    "start containerd") start ;;
    "stop containerd") stop ;;
    "restart containerd") stop; start ;;
    "is-active containerd") [ -e $pid ] && echo active ;;
    *) echo "systemctl $*: no systemd here" >&2; exit 1 ;;
esac
"""


class Ended:
    """The result of a command.

    Attributes:
        status: its exit status.
        output: its stdout and stderr.
    """

    def __init__(self, status: int, output: str) -> None:
        self.status = status
        self.output = output


def write_image(path: str) -> str:
    """Write the image of worlds as an archive."""
    return write_archive(path, [glibc().named(IMAGE)])


class World:
    """A world. It disappears when the context is left.

    Args:
        files: files to link into the current directory.
    """

    def __init__(self, node: SimulatedNode, image: str, *files: str) -> None:
        self._node = node
        self._image = image
        self._files = files
        self._undo = ExitStack()
        self._directory = ""
        self._namespace = f"world-{os.urandom(4).hex()}"
        self._shell: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._directory = tempfile.mkdtemp(prefix="world-")
            undo.callback(shutil.rmtree, self._directory, ignore_errors=True)
            self._fill(self._node)
            os.symlink(self._image, os.path.join(self._directory, "image.tar"))
            os.mkdir(os.path.join(self._directory, "files"))
            for path in self._files:
                os.symlink(path, os.path.join(self._directory, "files", os.path.basename(path)))
            undo.callback(self._end)
            self._start()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _fill(self, node: SimulatedNode) -> None:
        os.mkdir(os.path.join(self._directory, "cover"))
        with open(node.config_path, encoding="utf-8") as file:
            # Its state, layers and marks are where a node's are.
            lines = [line for line in file if not line.startswith(("state", "layers", "drained"))]
        for name, text in (
            ("config.toml", "".join(lines)),
            ("containerd.toml", DEBIAN),
            ("systemctl", _SYSTEMCTL),
        ):
            path = os.path.join(self._directory, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(path, 0o755 if name == "systemctl" else 0o644)

    def _start(self) -> None:
        argv = [
            "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc",
            "--kill-child", "bash", "-c", _SET_UP, "world", self._directory, default_cache(),
        ]  # fmt: skip
        environment = {
            "PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8",
            "CONTAINERD_NAMESPACE": self._namespace,
        }  # fmt: skip
        self._shell = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        ready = self.run("true")
        assert ready.status == 0, ready.output

    def _end(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            # unshare's child is the first process of the others: with it, all of them end.
            shell.send_signal(signal.SIGKILL)
            shell.wait()
            for pipe in (shell.stdin, shell.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

        self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        """Remove the cgroups of containers, which killed shims leave behind."""
        end = time.monotonic() + _TIMEOUT
        tops = glob.glob(f"/sys/fs/cgroup/**/{self._namespace}", recursive=True)
        for top in tops:
            for directory, _, _ in os.walk(top, topdown=False):
                while True:
                    try:
                        os.rmdir(directory)
                    except OSError as error:
                        if error.errno != errno.EBUSY or time.monotonic() > end:
                            raise
                        time.sleep(0.02)
                    else:
                        break

    def path(self, path: str) -> str:
        """Return the outside path of a file of the world, valid while the world exists.

        Args:
            path: absolute. An absolute link in the world leads out of it.
        """
        assert self._shell is not None
        return f"/proc/{self._shell.pid}/root{path}"

    def run(self, text: str) -> Ended:
        """Run a command in the world's only shell.

        Args:
            text: the command, with any number of lines.

        Raises:
            AssertionError: it did not exit in time, or ended the shell.
        """
        shell = self._shell
        assert shell is not None
        assert shell.stdin is not None
        assert shell.stdout is not None
        mark = f"--{os.urandom(8).hex()}--"
        wrapped = f"{{ {text}\n}} </dev/null 2>&1\nprintf '%s%s\\n' {mark} $?\n"
        shell.stdin.write(wrapped.encode())
        shell.stdin.flush()
        read = bytearray()
        ending = re.compile(rb"%s(\d+)\n\Z" % mark.encode())
        end = time.monotonic() + _TIMEOUT
        while not (found := ending.search(read)):
            left = max(0.0, end - time.monotonic())
            assert select.select([shell.stdout], [], [], left)[0], f"it goes on and on: {text}"
            piece = os.read(shell.stdout.fileno(), 1 << 16)
            assert piece, f"the shell has ended: {read.decode(errors='replace')}"
            read += piece
        output = read[: found.start()].decode(errors="replace")
        return Ended(int(found[1]), output)

    def do(self, text: str) -> str:
        """Run a command that has to succeed; return its output.

        Raises:
            AssertionError: it failed.
        """
        done = self.run(text)
        assert done.status == 0, done.output
        return done.output


def matches(command: Command, output: str) -> list[str]:
    """Return the lines of a page's output that the command did not print, in order."""
    lines = iter(output.splitlines())
    missing = []
    for wanted in command.output:
        pattern = re.compile(".*".join(re.escape(part) for part in wanted.strip().split("…")))
        if not any(pattern.fullmatch(line.strip()) for line in lines):
            missing.append(wanted)
    return missing
