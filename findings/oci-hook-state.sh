#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     The state on a hook's stdin has the status that the runtime specification gives for its kind: creating
#            for createRuntime, created for startContainer, running for poststart. Its pid and bundle are the
#            container's.
# Behaviour: runc has created for poststart. crun has created for createRuntime and starting, which no specification
#            knows, for startContainer; there its bundle is "/" and its pid 0, where runc's pid is 1.
# Seen:
#   runc, createRuntime: creating, its pid, its bundle
#   runc, poststart: created, its pid, its bundle
#   runc, poststop: stopped, pid none, its bundle
#   runc, startContainer: created, pid 1, its bundle
#   crun, createRuntime: created, its pid, its bundle
#   crun, poststart: running, its pid, its bundle
#   crun, poststop: stopped, pid 0, its bundle
#   crun, startContainer: starting, pid 0, /
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
    hooks = {}
    for kind in ("createRuntime", "poststart", "poststop"):
        hooks |= hook(kind, f"cat >{kind}")
    hooks |= hook("startContainer", "cat >/state")  # in the container
    done = run(runtime, "cat /state; sleep 1", lambda spec: spec.update(hooks=hooks))
    for kind in hooks:
        if kind == "startContainer":
            state = json.loads(done.stdout)
        else:
            with open(kind, encoding="utf-8") as file:
                state = json.load(file)
        pid = state.get("pid", "none")
        pid = "its pid" if isinstance(pid, int) and pid > 1 else f"pid {pid}"
        bundle = "/" if state["bundle"] == "/" else "its bundle"
        print(f"{runtime}, {kind}: {state['status']}, {pid}, {bundle}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, createRuntime: creating, its pid, its bundle
runc, poststart: created, its pid, its bundle
runc, poststop: stopped, pid none, its bundle
runc, startContainer: created, pid 1, its bundle
crun, createRuntime: created, its pid, its bundle
crun, poststart: running, its pid, its bundle
crun, poststop: stopped, pid 0, its bundle
crun, startContainer: starting, pid 0, /
END
