#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     A variable that the user gives (--env) wins over the one of a CDI device, as it wins over the image's. Two
#            devices of a container that have the same variable, as a list of GPUs, is an error, or the first one wins.
# Behaviour: The CDI device's variable wins over the user's and over the image's, without a word. Of two devices the one
#            that was asked for last wins, so the variable names one GPU where the container has two. A variable of a
#            CDI file is no default: what users may choose does not belong there.
# Seen:
#   --env=GPUS=user: user
#   --device=nvidia.com/gpu=0: 0
#   --env=GPUS=user --device=nvidia.com/gpu=0: 0
#   --device=nvidia.com/gpu=0 --device=nvidia.com/gpu=1: 1
#   --device=nvidia.com/gpu=1 --device=nvidia.com/gpu=0: 0
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
mkdir -p root/{etc/cdi,etc/containers,image/bin,old,proc,root,run,sys,var/tmp}
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
cd root
pivot_root . old
exec chroot . env -i PATH=/usr/sbin:/usr/bin HOME=/root bash /ask.sh
END

cat >root/ask.sh <<'END'
busybox tar -C /image -c . | podman import --quiet --change "ENV GPUS=image" - image >/dev/null
cat >/etc/cdi/nvidia.json <<'JSON'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
  {"name": "0", "containerEdits": {"env": ["GPUS=0"]}},
  {"name": "1", "containerEdits": {"env": ["GPUS=1"]}}]}
JSON
ask() { echo "$*: $(podman run --rm "$@" localhost/image sh -c 'echo $GPUS')"; }
gpu=--device=nvidia.com/gpu
ask --env=GPUS=user
ask $gpu=0
ask --env=GPUS=user $gpu=0
ask $gpu=0 $gpu=1
ask $gpu=1 $gpu=0
END
# All processes end with the first one.
unshare --mount --net --pid --fork --kill-child sh inside.sh | tee seen
diff seen - <<'END'
--env=GPUS=user: user
--device=nvidia.com/gpu=0: 0
--env=GPUS=user --device=nvidia.com/gpu=0: 0
--device=nvidia.com/gpu=0 --device=nvidia.com/gpu=1: 1
--device=nvidia.com/gpu=1 --device=nvidia.com/gpu=0: 0
END
