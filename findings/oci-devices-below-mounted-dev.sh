#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A device of linux.devices is in the container, whatever is mounted at /dev; or there is an error.
# Behaviour: If one of the mounts is a bind at /dev, runc and crun create no device node at all, and say nothing. A
#            pod with a hostPath volume at /dev has only what the host has there.
# Seen:
#   runc, a new /dev: there, status 0
#   runc, the host's /dev: missing, status 0
#   crun, a new /dev: there, status 0
#   crun, the host's /dev: missing, status 0
# Needs root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,opt,proc,sys}
cp root/bin/busybox rootfs/bin/sh
root/usr/sbin/runc spec

cat >run.py <<'END'
import copy
import json
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh", "root/usr/bin/crun"]
RUNTIMES = {"runc": ["root/usr/sbin/runc"], "crun": CRUN}
with open("config.json", encoding="utf-8") as file:
    USUAL = json.load(file)
USUAL["process"]["terminal"] = USUAL["root"]["readonly"] = False


def run(runtime, script, change):
    spec = copy.deepcopy(USUAL)
    spec["process"]["args"] = ["sh", "-c", script]
    change(spec)
    with open("config.json", "w", encoding="utf-8") as file:
        json.dump(spec, file)
    command = [*RUNTIMES[runtime], "--root=state", "run", f"finding-{sys.argv[1]}"]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def hook(kind, script, **more):
    return {kind: [{"path": "/bin/sh", "args": ["sh", "-c", script], **more}]}


def at_dev(spec):
    device(spec)
    spec["mounts"] = [each for each in spec["mounts"] if not each["destination"].startswith("/dev")]
    spec["mounts"].append({"destination": "/dev", "source": "/dev", "type": "bind", "options": ["rbind"]})


def device(spec):
    spec["linux"]["devices"] = [{"path": "/dev/new0", "type": "c", "major": 1, "minor": 3}]


for runtime in RUNTIMES:
    for where, change in {"a new /dev": device, "the host's /dev": at_dev}.items():
        done = run(runtime, "[ -c /dev/new0 ] && echo there || echo missing", change)
        print(f"{runtime}, {where}: {done.stdout.strip()}, status {done.returncode}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, a new /dev: there, status 0
runc, the host's /dev: missing, status 0
crun, a new /dev: there, status 0
crun, the host's /dev: missing, status 0
END
