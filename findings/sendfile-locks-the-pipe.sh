#!/bin/bash
# Packages:  the kernel (Linux 6.18), libfuse3 3.14.0-4 (Debian 12), mfusepy 3.1.1 (PyPI)
# Guess:     read(2) of a pipe with O_NONBLOCK never waits: it returns data, or EAGAIN.
# Behaviour: While another process sends a file into that pipe with sendfile(2), as busybox's cat does, the kernel has
#            the pipe locked, also while it waits for the file. Then read(2), and even the ioctl that counts the bytes
#            in the pipe, wait until the server of the file has answered; only poll(2) does not. If the other process
#            uses read(2) and write(2), nobody waits. A program with one thread that reads the output of others, such
#            as of containers with files of a network, answers nobody meanwhile.
# Seen:      sendfile: the longest poll took 0 s, the longest count or read 2 s
#            write:    the longest poll took 0 s, the longest count or read 0 s
# Needs root, and /dev/fuse.
set -euo pipefail
tmp=$(mktemp -d)
trap 'umount -l "$tmp/slow" 2>/dev/null || true; rm -rf "$tmp"' EXIT
cd "$tmp"
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check mfusepy==3.1.1 2>pip.log || { cat pip.log >&2; exit 1; }
apt-get -qq -o APT::Sandbox::User=root download libfuse3-3=3.14.0-4
dpkg -x libfuse3-3_*.deb root
mkdir slow

cat >serve.py <<'PY'
"""Serve two files whose second half takes two seconds."""
import stat
import time

from mfusepy import FUSE, Operations

HALF = 1 << 20


class Slow(Operations):
    use_ns = True

    def getattr(self, path, fh=None):
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": 2 * HALF}

    def read(self, path, size, offset, fh):
        if offset <= HALF < offset + size:
            time.sleep(2)
        return bytes(min(size, 2 * HALF - offset))


FUSE(Slow(), "slow", foreground=True)
PY
cat >read.py <<'PY'
import array
import fcntl
import os
import select
import termios
import time


def longest(send):
    """Return the longest times of poll, and of the other calls, while another process sends a file."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    if not os.fork():
        os.close(reader)
        send(writer)
        os._exit(0)
    os.close(writer)
    polls, calls = [], []

    def timed(times, call):
        began = time.monotonic()
        try:
            return call()
        except BlockingIOError:
            return None
        finally:
            times.append(time.monotonic() - began)

    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while True:
        timed(polls, lambda: poll.poll(0))
        timed(calls, lambda: fcntl.ioctl(reader, termios.FIONREAD, array.array("i", [0])))
        if timed(calls, lambda: os.read(reader, 1 << 16)) == b"":
            break
        time.sleep(0.0001)
    os.wait()
    return round(max(polls)), round(max(calls))


def sendfile(pipe):
    file = os.open("slow/a", os.O_RDONLY)
    while os.sendfile(pipe, file, None, 1 << 24):
        pass


def write(pipe):
    with open("slow/b", "rb", buffering=0) as file:
        while chunk := file.read(4096):
            os.write(pipe, chunk)


seen = {send.__name__: longest(send) for send in (sendfile, write)}
for name, times in seen.items():
    print("%-9s the longest poll took %d s, the longest count or read %d s" % (f"{name}:", *times))
raise SystemExit(seen != {"sendfile": (0, 2), "write": (0, 0)})
PY
FUSE_LIBRARY_PATH=$(find "$tmp/root" -name libfuse3.so.3) venv/bin/python serve.py 2>serve.log &
until mountpoint -q slow; do kill -0 $! || { cat serve.log >&2; exit 1; }; sleep 0.1; done
python3 read.py || { echo "this has changed" >&2; exit 1; }
