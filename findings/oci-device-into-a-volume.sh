#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A device is made in the container's own /dev, so it is gone with the container. If a volume is mounted at
#            a directory below /dev, as a hostPath of /dev/dri, a device in it is left out or is an error.
# Behaviour: runc and crun make the node in the volume, so in the host's directory: it stays there when the container
#            is gone, for everybody on the host to use, with the mode of the spec. For a node that is there already
#            the spec's mode and owner count for nothing. runc up to 1.3 and crun up to 1.28 do the same.
# Seen (the host has gpu1, of owner 9 and with mode 600; the spec has both nodes, with mode 666 and owner 0):
#   runc: the container has gpu0 1:3 666 owner 0, gpu1 1:5 600 owner 9
#   runc: afterwards the host's directory has gpu0 1:3 666 owner 0, gpu1 1:5 600 owner 9
#   crun: the container has gpu0 1:3 666 owner 0, gpu1 1:5 600 owner 9
#   crun: afterwards the host's directory has gpu0 1:3 666 owner 0, gpu1 1:5 600 owner 9
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
mkdir gpus

cat >run.py <<'END'
import copy
import glob
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
    at = {"destination": "/dev/gpus", "source": f"{os.getcwd()}/gpus", "type": "bind", "options": ["rbind"]}
    spec["mounts"].append(at)
    spec["linux"]["devices"] = [
        {"path": f"/dev/gpus/{name}", "type": "c", "major": 1, "minor": minor, "fileMode": 0o666, "uid": 0, "gid": 0}
        for name, minor in {"gpu0": 3, "gpu1": 5}.items()
    ]


LIST = "stat -c '%n %t:%T %a owner %u' gpu*"
for runtime in RUNTIMES:
    for path in glob.glob("gpus/*"):
        os.unlink(path)
    os.mknod("gpus/gpu1", 0o20600, os.makedev(1, 5))
    os.chown("gpus/gpu1", 9, 9)
    done = run(runtime, "run", ["sh", "-c", f"cd /dev/gpus && {LIST}"], change=change)
    print(f"{runtime}: the container has {', '.join((done.stdout or done.stderr).splitlines())}")
    after = subprocess.run(LIST, cwd="gpus", shell=True, capture_output=True, text=True)
    print(f"{runtime}: afterwards the host's directory has {', '.join(after.stdout.splitlines())}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc: the container has gpu0 1:3 666 owner 0, gpu1 1:5 600 owner 9
runc: afterwards the host's directory has gpu0 1:3 666 owner 0, gpu1 1:5 600 owner 9
crun: the container has gpu0 1:3 666 owner 0, gpu1 1:5 600 owner 9
crun: afterwards the host's directory has gpu0 1:3 666 owner 0, gpu1 1:5 600 owner 9
END
