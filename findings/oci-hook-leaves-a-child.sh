#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A hook is done when its process ends. So it may start a daemon, as one for MPS or nvidia-persistenced,
#            and its timeout counts for the hook alone.
# Behaviour: runc reads the hook's output, and waits until every process has closed it: for a child that inherited it,
#            as long as that lives. With a timeout the container fails ("hook ran past specified timeout"), although
#            the hook ended at once with status 0. "crun create" does not wait. runc up to 1.3 and crun up to 1.28 do
#            the same. So a daemon has to get another stdout and stderr.
# Seen (the child lives for three seconds):
#   runc: hook without children: created
#   runc: a child that holds the output: created, after the child
#   runc: a child that holds the output, timeout 1: hook ran past specified timeout
#   runc: a child without output, timeout 1: created
#   crun: hook without children: created
#   crun: a child that holds the output: created
#   crun: a child that holds the output, timeout 1: created
#   crun: a child without output, timeout 1: created
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

cat >run.py <<'END'
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time

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
    with open("output", "w", encoding="utf-8") as file:
        return subprocess.run(command, stdin=subprocess.DEVNULL, text=True, stdout=file, stderr=subprocess.STDOUT)



def hook(script, **more):
    def change(spec):
        spec["hooks"] = {"createRuntime": [{"path": "/bin/sh", "args": ["sh", "-c", script], "env": [], **more}]}

    return change


CHILD = f"echo $! >>{os.getcwd()}/children"
CASES = {
    "hook without children": hook("exit 0"),
    "a child that holds the output": hook(f"/bin/sleep 3 & {CHILD}"),
    "a child that holds the output, timeout 1": hook(f"/bin/sleep 3 & {CHILD}", timeout=1),
    "a child without output, timeout 1": hook(f"/bin/sleep 3 >/dev/null 2>&1 & {CHILD}", timeout=1),
}
LATE = "hook ran past specified timeout"
for runtime in RUNTIMES:
    for what, change in CASES.items():
        start = time.monotonic()
        done = run(runtime, "create", ["sh"], change=change)
        after = ", after the child" if time.monotonic() - start > 2 else ""
        with open("output", encoding="utf-8") as file:
            text = file.read()
        run(runtime, "delete --force")
        print(f"{runtime}: {what}:", "created" + after if done.returncode == 0 else LATE if LATE in text else text)
with open("children", encoding="utf-8") as file:
    for pid in map(int, file):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc: hook without children: created
runc: a child that holds the output: created, after the child
runc: a child that holds the output, timeout 1: hook ran past specified timeout
runc: a child without output, timeout 1: created
crun: hook without children: created
crun: a child that holds the output: created
crun: a child that holds the output, timeout 1: created
crun: a child without output, timeout 1: created
END
