#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A mount of type "bind" is a bind mount, in an OCI spec, as in "ctr run --mount type=bind,src=/a,dst=/b".
# Behaviour: The type counts for nothing: only the options bind and rbind make a bind mount. Without them the runtime
#            looks for a file system called bind, and "no such device" sounds as if the source was missing.
# Seen:
#   runc, bind, ro: No such device
#   runc, bind, rbind ro: mounted
#   runc, none, rbind ro: mounted
#   runc, no type, rbind ro: mounted
#   crun, bind, ro: No such device
#   crun, bind, rbind ro: mounted
#   crun, none, rbind ro: mounted
#   crun, no type, rbind ro: mounted
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


for runtime in RUNTIMES:
    for kind, options in (("bind", "ro"), ("bind", "rbind ro"), ("none", "rbind ro"), ("", "rbind ro")):
        mount = {"destination": "/opt", "source": ".", "options": options.split()}
        mount |= {"type": kind} if kind else {}
        done = run(runtime, "true", lambda spec: spec["mounts"].append(mount))
        found = "No such device" if "no such device" in done.stderr.lower() else done.stderr.strip() or "mounted"
        print(f"{runtime}, {kind or 'no type'}, {options}: {found}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, bind, ro: No such device
runc, bind, rbind ro: mounted
runc, none, rbind ro: mounted
runc, no type, rbind ro: mounted
crun, bind, ro: No such device
crun, bind, rbind ro: mounted
crun, none, rbind ro: mounted
crun, no type, rbind ro: mounted
END
