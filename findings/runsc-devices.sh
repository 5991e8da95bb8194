#!/bin/bash
# Packages:  runsc 0.0~20221219.0-2+b3, runc 1.1.5+ds1-1+deb12u1 (Debian 12), runsc 0.0~20240729.0-4+b7 (13)
# Guess:     gVisor's runsc gives a container the devices of its spec, or refuses a device that its kernel, which is not
#            Linux, does not have. What is not in the spec is not in /dev.
# Behaviour: Debian 12's runsc leaves out all devices without a word. Debian 13's makes a node of any numbers, so a GPU
#            is there for what looks for /dev/nvidia0 and cannot be opened: ENXIO, as if there was no driver. Both have
#            nodes that no spec asked for, among them /dev/fuse. A bind mount of a node works in both for the few that
#            runsc has itself. So under runsc a container with a GPU starts, and its program finds out.
# Seen (the spec has zero0 with 1:5 as /dev/zero, nvidia0 with 195:0, and a bind mount of /dev/zero at /dev/bound):
#   runc: zero0 read, nvidia0 ENXIO, bound read, fuse missing
#   runsc of Debian 12: zero0 missing, nvidia0 missing, bound read, fuse there
#   runsc of Debian 13: zero0 read, nvidia0 ENXIO, bound read, fuse there
# Needs root, and a machine without NVIDIA's kernel module.
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
fetch bookworm runsc=0.0~20221219.0-2+b3 runc=1.1.5+ds1-1+deb12u1 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1
fetch trixie runsc=0.0~20240729.0-4+b7
export LD_LIBRARY_PATH=$directory/bookworm/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,proc,sys}
cp bookworm/root/bin/busybox rootfs/bin/sh
bookworm/root/usr/sbin/runc spec

cat >run.py <<'END'
import json
import pathlib
import subprocess
import sys

GVISOR = ["usr/bin/runsc", "--network=none", "--ignore-cgroups"]
RUNTIMES = {
    "runc": ["bookworm/root/usr/sbin/runc"],
    "runsc of Debian 12": [f"bookworm/root/{GVISOR[0]}", *GVISOR[1:]],
    "runsc of Debian 13": [f"trixie/root/{GVISOR[0]}", *GVISOR[1:]],
}
LOOK = """
for name in zero0 nvidia0 bound; do
  [ -c /dev/$name ] || { echo "$name missing"; continue; }
  error=$(head -c 1 /dev/$name 2>&1 >/dev/null) && echo "$name read" || echo "$name $error"
done
[ -c /dev/fuse ] && echo fuse there || echo fuse missing
"""
config = pathlib.Path("config.json")
spec = json.loads(config.read_text(encoding="utf-8"))
spec["process"].update(terminal=False, args=["sh", "-c", LOOK])
devices = {"/dev/zero0": (1, 5), "/dev/nvidia0": (195, 0)}
spec["linux"]["devices"] = [
    {"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 0o666}
    for path, (major, minor) in devices.items()
]
spec["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
spec["mounts"].append({"destination": "/dev/bound", "source": "/dev/zero", "type": "bind", "options": ["bind"]})
config.write_text(json.dumps(spec), encoding="utf-8")
for name, runtime in RUNTIMES.items():
    # All that a runtime leaves ends with the first process.
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *runtime]
    done = subprocess.run(
        [*isolated, f"--root={pathlib.Path.cwd()}/state-{name[-1]}", "run", f"finding-{sys.argv[1]}"],
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
    )
    lines = done.stdout.replace("head: /dev/nvidia0: No such device or address", "ENXIO").splitlines()
    print(f"{name}: {', '.join(lines) or done.stderr}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc: zero0 read, nvidia0 ENXIO, bound read, fuse missing
runsc of Debian 12: zero0 missing, nvidia0 missing, bound read, fuse there
runsc of Debian 13: zero0 read, nvidia0 ENXIO, bound read, fuse there
END
