#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A device whose path exists in the image as another file is an error, as the runtime specification demands
#            ("the runtime MUST generate an error"), or replaces the file.
# Behaviour: runc and crun keep the image's file and say nothing: the program opens a plain file. For two devices of one
#            path the same holds: the first is there, and the second is ignored.
# Seen:
#   runc, over a file: of the image, status 0
#   runc, 1:3 and 1:5: minor 3, status 0
#   crun, over a file: of the image, status 0
#   crun, 1:3 and 1:5: minor 3, status 0
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


NULL, ZERO = ({"type": "c", "major": 1, "minor": minor} for minor in (3, 5))
for runtime in RUNTIMES:
    devices = [{"path": "/opt/device", **NULL}]
    with open("rootfs/opt/device", "w", encoding="utf-8") as file:
        file.write("of the image")
    done = run(runtime, "cat /opt/device", lambda spec: spec["linux"].update(devices=devices))
    print(f"{runtime}, over a file: {done.stdout}, status {done.returncode}")
    devices = [{"path": "/dev/device", **NULL}, {"path": "/dev/device", **ZERO}]
    done = run(runtime, "stat -c %T /dev/device", lambda spec: spec["linux"].update(devices=devices))
    print(f"{runtime}, 1:3 and 1:5: minor {done.stdout.strip()}, status {done.returncode}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, over a file: of the image, status 0
runc, 1:3 and 1:5: minor 3, status 0
crun, over a file: of the image, status 0
crun, 1:3 and 1:5: minor 3, status 0
END
