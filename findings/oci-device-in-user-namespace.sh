#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A device of linux.devices has the numbers and the mode that the spec says, also in a container with a
#            user namespace, where the runtime cannot create nodes; or there is an error.
# Behaviour: With a user namespace runc mounts the host's node of the same path, whatever its numbers and mode are. So
#            a GPU that is renamed, as by "--device /dev/nvidia1:/dev/nvidia0" or a CDI device with another hostPath,
#            is another GPU's node. crun has the right numbers, but a device without a fileMode, as in most CDI specs,
#            has mode 0, so that another user than root cannot open it. Without a user namespace both are 666. runc up
#            to 1.3 and crun up to 1.28 do the same.
# Seen (on the host gpu0 is 1:5 with mode 600; the spec's gpu0 is 1:3):
#   runc:                  no mode: 1:3 666; mode 640: 1:3 640
#   runc, user namespace:  no mode: 1:5 600; mode 640: 1:5 600
#   crun:                  no mode: 1:3 666; mode 640: 1:3 640
#   crun, user namespace:  no mode: 1:3 0; mode 640: 1:3 640
# Needs root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,proc,sys} nodes
cp root/bin/busybox rootfs/bin/sh
root/usr/sbin/runc spec
mknod --mode=600 nodes/gpu0 c 1 5

cat >run.py <<'END'
import copy
import json
import os
import shutil
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh", "root/usr/bin/crun"]
RUNTIMES = {"runc": ["root/usr/sbin/runc"], "crun": CRUN}
with open("config.json", encoding="utf-8") as file:
    USUAL = json.load(file)
USUAL["process"]["terminal"] = USUAL["root"]["readonly"] = False


GPU0 = f"{os.getcwd()}/nodes/gpu0"


def run(runtime, user_namespace, **more):
    spec = copy.deepcopy(USUAL)
    spec["process"]["args"] = ["sh", "-c", f"stat -c '%t:%T %a' {GPU0}"]
    spec["linux"]["devices"] = [{"path": GPU0, "type": "c", "major": 1, "minor": 3, **more}]
    if user_namespace:
        spec["linux"]["namespaces"].append({"type": "user"})
        for key in ("uidMappings", "gidMappings"):
            spec["linux"][key] = [{"containerID": 0, "hostID": 0, "size": 65536}]
    with open("config.json", "w", encoding="utf-8") as file:
        json.dump(spec, file)
    # A node that is there already would stay as it is.
    shutil.rmtree("rootfs" + os.path.dirname(GPU0), ignore_errors=True)
    command = [*RUNTIMES[runtime], f"--root={os.getcwd()}/state", "run", f"finding-{sys.argv[1]}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip() or done.stderr


for runtime in RUNTIMES:
    for where, user_namespace in {":                ": False, ", user namespace:": True}.items():
        bare, mode = run(runtime, user_namespace), run(runtime, user_namespace, fileMode=0o640)
        print(f"{runtime}{where}  no mode: {bare}; mode 640: {mode}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc:                  no mode: 1:3 666; mode 640: 1:3 640
runc, user namespace:  no mode: 1:5 600; mode 640: 1:5 600
crun:                  no mode: 1:3 666; mode 640: 1:3 640
crun, user namespace:  no mode: 1:3 0; mode 640: 1:3 640
END
