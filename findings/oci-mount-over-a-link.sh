#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A file that is mounted at /lib/libcuda.so.1 hides what the image has at this path, a link or a file, and
#            no other path.
# Behaviour: The link stays, and the mount is at the file to which it leads: the image's libcuda.so.535 has the
#            contents of the host's file, too. If the link leads nowhere, as in an image that had its driver removed,
#            runc makes the missing file in the image and mounts there, and crun does not start the container. runc up
#            to 1.3 and crun up to 1.28 do the same.
# Seen (the image has a link libcuda.so.1 to libcuda.so.535; a file of the host is mounted at the link):
#   runc: a link to a file: the link stays, the file is covered
#   runc: a link to nothing: the link stays, the file is covered; the image has a new file
#   crun: a link to a file: the link stays, the file is covered
#   crun: a link to nothing: openat2 `lib/libcuda.so.1`: No such file or directory
# Needs root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,lib,opt,proc,sys}
cp root/bin/busybox rootfs/bin/sh
root/usr/sbin/runc spec
echo host >driver
ln -s libcuda.so.535 rootfs/lib/libcuda.so.1

cat >run.py <<'END'
import copy
import json
import os
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh", "root/usr/bin/crun"]
RUNTIMES = {"runc": ["root/usr/sbin/runc"], "crun": CRUN}
NAME = f"finding-{sys.argv[1]}"
with open("config.json", encoding="utf-8") as file:
    USUAL = json.load(file)
USUAL["process"]["terminal"] = USUAL["root"]["readonly"] = False


def run(runtime, verb, args=(), **more):
    """Run a verb of the runtime, with a spec that change has changed if there are args."""
    if args:
        spec = copy.deepcopy(USUAL)
        spec["process"]["args"] = list(args)
        more["change"](spec)
        with open("config.json", "w", encoding="utf-8") as file:
            json.dump(spec, file)
    command = [*RUNTIMES[runtime], f"--root={os.getcwd()}/state", *verb.split(), NAME]
    return subprocess.run(command, stdin=subprocess.DEVNULL, text=True, capture_output=True)



def change(spec):
    at = {"destination": "/lib/libcuda.so.1", "source": f"{os.getcwd()}/driver", "options": ["rbind", "ro"]}
    spec["mounts"].append(at)


SCRIPT = """
[ -L /lib/libcuda.so.1 ] && echo 'the link stays' || echo 'the link is gone'
[ "$(cat /lib/libcuda.so.535)" = host ] && echo 'the file is covered' || echo 'the file is not covered'
"""
TARGET = "rootfs/lib/libcuda.so.535"
for runtime in RUNTIMES:
    for what, text in {"a link to a file": "image", "a link to nothing": None}.items():
        if os.path.lexists(TARGET):
            os.unlink(TARGET)
        if text:
            with open(TARGET, "w", encoding="utf-8") as file:
                file.write(text)
        done = run(runtime, "run", ["sh", "-c", SCRIPT], change=change)
        found = ", ".join(done.stdout.splitlines()) or done.stderr.strip()
        made = "; the image has a new file" if not text and os.path.exists(TARGET) else ""
        print(f"{runtime}: {what}: {found}{made}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc: a link to a file: the link stays, the file is covered
runc: a link to nothing: the link stays, the file is covered; the image has a new file
crun: a link to a file: the link stays, the file is covered
crun: a link to nothing: openat2 `lib/libcuda.so.1`: No such file or directory
END
