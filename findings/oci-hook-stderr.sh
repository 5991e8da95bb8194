#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     The error of a container whose hook fails has what the hook wrote to stderr.
# Behaviour: Only runc's has it. crun gives its hooks /dev/null as stderr, so the error is "exit code: 7", and the
#            reason is nowhere. A hook that wants to be understood has to write a file.
# Seen:
#   runc: the error has it; stderr is pipe
#   crun: the error lacks it; stderr is /dev/null
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
    hooks = hook("createRuntime", "readlink /proc/self/fd/2 >stderr-of-hook; echo the reason >&2; exit 7")
    done = run(runtime, "true", lambda spec: spec.update(hooks=hooks))
    with open("stderr-of-hook", encoding="utf-8") as file:
        where = file.read().partition(":")[0].strip()
    print(f"{runtime}: the error {'has' if 'the reason' in done.stderr else 'lacks'} it; stderr is {where}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc: the error has it; stderr is pipe
crun: the error lacks it; stderr is /dev/null
END
