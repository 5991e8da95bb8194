#!/bin/bash
# Packages:  psmisc 23.6-1, lsof 4.95.0-1, runc 1.1.5+ds1-1+deb12u1 (Debian 12)
# Guess:     "fuser -v /dev/nvidia*" and "lsof /dev/nvidia*" on the host list each process that has a GPU open, as one
#            does before the driver's modules are unloaded or a GPU is reset: root sees the processes of containers.
# Behaviour: Both compare the file: file system and inode. A container has a node of its own in its /dev, with the same
#            numbers, so the program that has the GPU open there is not listed, and fuser's status says that nobody
#            uses it. lsof without a name lists the container's process with the device's numbers; to find all, one
#            has to compare those.
# Seen (a process of the host and one of a container have the device open):
#   fuser HOST'S NODE: host
#   lsof HOST'S NODE: host
#   fuser HOST'S NODE, without the host's process: status 1
#   lsof without a name, by the device's numbers: container host
# Needs root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download psmisc=23.6-1 lsof=4.95.0-1 runc=1.1.5+ds1-1+deb12u1 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,proc,sys} host
cp root/bin/busybox rootfs/bin/sh
cp root/bin/busybox sh
root/usr/sbin/runc spec

cat >run.py <<'END'
import json
import os
import pathlib
import subprocess

# A device with these numbers stands for a GPU.
MAJOR, MINOR = 1, 5
HOLD = ["-c", "exec 3</dev/nvidia0; echo open; read line"]
node = pathlib.Path("host/nvidia0")
subprocess.run(["mknod", node, "c", str(MAJOR), str(MINOR)], check=True)
config = pathlib.Path("config.json")
spec = json.loads(config.read_text(encoding="utf-8"))
spec["process"].update(terminal=False, args=["sh", *HOLD])
spec["linux"]["devices"] = [{"path": "/dev/nvidia0", "type": "c", "major": MAJOR, "minor": MINOR}]
config.write_text(json.dumps(spec), encoding="utf-8")


def start(argv):
    child = subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout.readline() == "open\n"
    return child


def ask(program, *arguments):
    return subprocess.run([program, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


host = start([os.path.abspath("sh"), "-c", HOLD[1].replace("/dev/", "host/")])
runc = ["root/usr/sbin/runc", f"--root={os.getcwd()}/state"]
container = start([*runc, "run", "gpu"])
state = json.loads(ask(*runc, "state", "gpu").stdout)
names = {str(host.pid): "host", str(state["pid"]): "container"}


def named(numbers):
    return " ".join(sorted({names[number] for number in numbers if number in names})) or "nobody"


print("fuser HOST'S NODE:", named(ask("root/bin/fuser", node).stdout.split()))
print("lsof HOST'S NODE:", named(ask("root/usr/bin/lsof", "-t", node).stdout.split()))
by_numbers = []
for line in ask("root/usr/bin/lsof", "-n", "-P", "-F", "pr").stdout.splitlines():
    if line[0] == "p":
        process = line[1:]
    elif line[1:] == hex(os.makedev(MAJOR, MINOR)):
        by_numbers.append(process)
host.communicate("\n")
print("fuser HOST'S NODE, without the host's process: status", ask("root/bin/fuser", node).returncode)
print("lsof without a name, by the device's numbers:", named(by_numbers))
container.communicate("\n")
END
# All that is left ends with the first process.
unshare --mount --pid --fork --kill-child --mount-proc python3 run.py | tee seen
diff seen - <<'END'
fuser HOST'S NODE: host
lsof HOST'S NODE: host
fuser HOST'S NODE, without the host's process: status 1
lsof without a name, by the device's numbers: container host
END
