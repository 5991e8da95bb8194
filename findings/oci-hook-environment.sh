#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A hook of an OCI runtime has the environment that its env says: none of it if env is missing or empty.
# Behaviour: A missing env and an empty one are not the same. Without env the hook has the whole environment of the
#            runtime, and so the engine's and the shim's: proxies, PATH, LD_LIBRARY_PATH. An empty list gives it none of
#            that. A program that reads and writes such a spec may drop empty lists.
# Seen:
#   runc, no env: everything
#   runc, empty env: nothing
#   runc, env A=1: nothing
#   crun, no env: everything
#   crun, empty env: nothing
#   crun, env A=1: nothing
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
    for how, more in {"no env": {}, "empty env": {"env": []}, "env A=1": {"env": ["A=1"]}}.items():
        hooks = hook("createRuntime", 'echo "${OF_THE_CALLER-nothing}" >seen-by-hook', **more)
        run(runtime, "true", lambda spec: spec.update(hooks=hooks))
        with open("seen-by-hook", encoding="utf-8") as file:
            print(f"{runtime}, {how}: {file.read().strip()}")
END
export OF_THE_CALLER=everything
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, no env: everything
runc, empty env: nothing
runc, env A=1: nothing
crun, no env: everything
crun, empty env: nothing
crun, env A=1: nothing
END
