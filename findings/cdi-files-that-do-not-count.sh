#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     A CDI file in /etc/cdi wins over one in /var/run/cdi, as the administrator's file wins over a generated
#            one with systemd or udev. If two files of a directory have the same device, one of them wins, or the
#            error names them. A file that ends with .yml is read.
# Behaviour: /var/run/cdi wins, without a word: a correction in /etc/cdi does nothing once a service writes there.
#            podman cannot use a device that two files of a directory define, even if both files are equal, as after
#            one was generated again with another name. podman does not read a .yml file, or a file of a version that
#            it does not know. The error is that of a misspelled name each time. podman 4.3 does the same.
# Seen:
#   no file: unresolvable CDI devices
#   /etc/cdi: etc
#   /etc/cdi and /var/run/cdi: run
#   two equal files in /etc/cdi: unresolvable CDI devices
#   nvidia.yml: unresolvable CDI devices
#   version 1.0.0: unresolvable CDI devices
# Needs root. Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial root
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
: >status
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::State::status=$PWD/status" -o "Dir::Cache=$PWD" -o APT::Install-Recommends=false
  -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" --yes --download-only install base-files bash busybox-static coreutils \
  podman=5.4.2+ds1-2+b2 crun=1.21-1 >/dev/null
for package in archives/*.deb; do dpkg -x "$package" root; done

# The programs run in a root directory of their own, and without cgroups.
mkdir -p root/{etc/containers,image/bin,image/usr/lib,proc,root,run,sys,var/tmp}
cp root/usr/bin/busybox root/image/bin/sh
printf 'root:x:0:0::/root:/bin/sh\n' >root/etc/passwd
printf '{"default": [{"type": "insecureAcceptAnything"}]}\n' >root/etc/containers/policy.json
cat >root/etc/containers/storage.conf <<'END'
[storage]
driver = "vfs"
graphroot = "/store"
runroot = "/run/store"
END
cat >root/etc/containers/containers.conf <<'END'
[containers]
cgroups = "disabled"
default_ulimits = ["nofile=512:512", "nproc=512:512"]
log_driver = "k8s-file"
netns = "none"
seccomp_profile = "unconfined"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
END
cat >inside.sh <<'END'
mount --bind root root
mount -t tmpfs tmpfs root/run
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount --rbind /sys root/sys
mount -t cgroup2 none root/sys/fs/cgroup
exec chroot root env -i PATH=/usr/sbin:/usr/bin HOME=/root bash -c "$1"
END
# All processes end with the first one.
inside() { unshare --mount --net --pid --fork --kill-child sh inside.sh "$1"; }

mkdir -p root/etc/cdi
cat >root/ask.sh <<'END'
# write FILE VERSION VALUE
write() {
  mkdir -p "${1%/*}"
  echo '{"cdiVersion": "'"$2"'", "kind": "nvidia.com/gpu", "devices": [
    {"name": "0", "containerEdits": {"env": ["FROM='"$3"'"]}}]}' >"$1"
}
ask() {
  echo "$1: $(podman run --rm --device nvidia.com/gpu=0 localhost/image sh -c 'echo "$FROM"' 2>&1 |
    busybox sed 's/.*unresolvable CDI devices.*/unresolvable CDI devices/')"
  rm -rf /etc/cdi/* /var/run/cdi
}
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
ask "no file"
write /etc/cdi/nvidia.json 0.5.0 etc
ask "/etc/cdi"
write /etc/cdi/nvidia.json 0.5.0 etc
write /var/run/cdi/nvidia.json 0.5.0 run
ask "/etc/cdi and /var/run/cdi"
write /etc/cdi/nvidia.json 0.5.0 etc
write /etc/cdi/nvidia-old.json 0.5.0 etc
ask "two equal files in /etc/cdi"
write /etc/cdi/nvidia.yml 0.5.0 etc
ask "nvidia.yml"
write /etc/cdi/nvidia.json 1.0.0 etc
ask "version 1.0.0"
END
inside ". /ask.sh" | tee seen
diff seen - <<'END'
no file: unresolvable CDI devices
/etc/cdi: etc
/etc/cdi and /var/run/cdi: run
two equal files in /etc/cdi: unresolvable CDI devices
nvidia.yml: unresolvable CDI devices
version 1.0.0: unresolvable CDI devices
END
