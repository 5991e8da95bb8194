#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A key of config.json whose letters have another case, as "Devices" for "devices", is an unknown one,
#            which a runtime ignores, as the runtime specification demands. So a spec that works with one runtime
#            works with the other, and what reads a spec finds all that counts by the exact names.
# Behaviour: runc takes it for the key, as Go's JSON decoder does; crun ignores it. So a misspelled spec has its GPU
#            with runc and none with crun, without a word. Of two spellings in one object runc takes the one that
#            comes last. runc up to 1.3 and crun up to 1.28 do the same.
# Seen (gpu0 is 1:3 by the spec, gpu0 of "Devices" 1:5):
#   runc, devices: 1:3
#   runc, Devices: 1:5
#   runc, devices and Devices: 1:5
#   runc, Devices and devices: 1:3
#   crun, devices: 1:3
#   crun, Devices: none
#   crun, devices and Devices: 1:3
#   crun, Devices and devices: 1:3
# Needs root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,proc,sys}
cp root/bin/busybox rootfs/bin/sh
root/usr/sbin/runc spec

cat >run.py <<'END'
import json
import pathlib
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh", "root/usr/bin/crun"]
RUNTIMES = {"runc": ["root/usr/sbin/runc"], "crun": CRUN}
MINORS = {"devices": 3, "Devices": 5}
config = pathlib.Path("config.json")
spec = json.loads(config.read_text(encoding="utf-8"))
spec["process"].update(terminal=False, args=["sh", "-c", "[ ! -e /dev/gpu0 ] || stat -c 1:%T /dev/gpu0"])
for name, runtime in RUNTIMES.items():
    for keys in (["devices"], ["Devices"], ["devices", "Devices"], ["Devices", "devices"]):
        for key in MINORS:
            spec["linux"].pop(key, None)
        for key in keys:
            spec["linux"][key] = [{"path": "/dev/gpu0", "type": "c", "major": 1, "minor": MINORS[key]}]
        config.write_text(json.dumps(spec), encoding="utf-8")
        done = subprocess.run(
            [*runtime, "--root=state", "run", f"finding-{sys.argv[1]}"],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )
        print(f"{name}, {' and '.join(keys)}: {done.stdout.strip() or done.stderr or 'none'}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, devices: 1:3
runc, Devices: 1:5
runc, devices and Devices: 1:5
runc, Devices and devices: 1:3
crun, devices: 1:3
crun, Devices: none
crun, devices and Devices: 1:3
crun, Devices and devices: 1:3
END
