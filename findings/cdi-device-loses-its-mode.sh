#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     A device has the mode and the owner of the host's node in the container, whether the container gets it by
#            "--device PATH" or by CDI: a CDI file without type and numbers takes those from the host's node.
# Behaviour: By CDI it has mode 666 and belongs to root, unless the file says otherwise; only the type and the numbers
#            come from the host. So a program that is not root can open a GPU of /dev/dri with CDI, and needs the
#            group of the node without CDI. containerd 1.7 and 2.1 do the same.
# Seen (the host's node is 1:3, with mode 640 and group 44):
#   --device /node:/dev/gpu0: 1:3, mode 640, group 44
#   --device nvidia.com/gpu=0: 1:3, mode 666, group 0
#   --device nvidia.com/gpu=1: 1:3, mode 640, group 0
#   --device nvidia.com/gpu=2: 1:3, mode 666, group 44
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

mknod --mode=640 root/node c 1 3
chgrp 44 root/node
mkdir root/etc/cdi
cat >root/etc/cdi/example.json <<'END'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
  {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/node"}]}},
  {"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/node", "fileMode": 416}]}},
  {"name": "2", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/node", "gid": 44}]}}]}
END
cat >root/ask.sh <<'END'
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
for device in /node:/dev/gpu0 nvidia.com/gpu={0,1,2}; do
  echo "--device $device: $(podman run --rm --device "$device" localhost/image sh -c \
    'stat -c "%t:%T, mode %a, group %g" /dev/gpu0' 2>&1)"
done
END
inside ". /ask.sh" | tee seen
diff seen - <<'END'
--device /node:/dev/gpu0: 1:3, mode 640, group 44
--device nvidia.com/gpu=0: 1:3, mode 666, group 0
--device nvidia.com/gpu=1: 1:3, mode 640, group 0
--device nvidia.com/gpu=2: 1:3, mode 666, group 44
END
