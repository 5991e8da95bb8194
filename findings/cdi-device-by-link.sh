#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     The hostPath of a CDI device may be what "podman --device" takes: a link with a stable name, as those of
#            /dev/dri/by-path and /dev/disk/by-id, or a directory of nodes, as /dev/dri.
# Behaviour: CDI takes neither. It looks at the link itself: "not a device node", and the container does not start. If
#            the file also has the type and the numbers, nobody looks at the link. Those are the numbers that the stable
#            name was to spare.
# Seen:
#   --device, link: /dev/gpu0
#   CDI, link: not a device node
#   CDI, link and numbers: /dev/gpu0
#   --device, directory: gpu
#   CDI, directory: not a device node
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
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
mkdir /by-path /nodes
ln -s /dev/zero /by-path/gpu
busybox mknod /nodes/gpu c 1 5
say() { busybox sed -E 's/.*(not a device node).*/\1/'; }
cdi() {
  echo '{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits":
    {"deviceNodes": [{'"$2"'}]}}]}' >/etc/cdi/nvidia.json
  echo "CDI, $1: $(podman run --rm --device nvidia.com/gpu=0 localhost/image sh -c 'ls /dev/gpu*' 2>&1 | say)"
}
device() { echo "--device, $1: $(podman run --rm --device "$2" localhost/image sh -c 'ls /dev/gpu*' 2>&1 | say)"; }
device link /by-path/gpu:/dev/gpu0
cdi link '"path": "/dev/gpu0", "hostPath": "/by-path/gpu"'
cdi "link and numbers" '"path": "/dev/gpu0", "hostPath": "/by-path/gpu", "type": "c", "major": 1, "minor": 5'
device directory /nodes:/dev/gpus
cdi directory '"path": "/dev/gpus", "hostPath": "/nodes"'
END
# All processes end with the first one.
unshare --mount --net --pid --fork --kill-child sh inside.sh | tee seen
diff seen - <<'END'
--device, link: /dev/gpu0
CDI, link: not a device node
CDI, link and numbers: /dev/gpu0
--device, directory: gpu
CDI, directory: not a device node
END
