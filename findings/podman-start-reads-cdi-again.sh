#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     A container has the CDI device that it was created with, as it has its mounts and its environment, until it
#            is removed. To generate the CDI file again is for new containers.
# Behaviour: Each start and restart looks the name up again. So if the file was generated again after a GPU was added
#            or MIG devices were made, index 1 is another GPU for the same container, and a container that worked does
#            not start if its name is gone from the file. "podman inspect" does not show that it has a device, only the
#            variables of its last start.
# Seen (the container was created with nvidia.com/gpu=1):
#   created:                    GPU-1, inspect: no device, GPU-1
#   another GPU is 1:           GPU-2, inspect: no device, GPU-2
#   restart, file as at first:  GPU-1, inspect: no device, GPU-1
#   no 1 in the file:           unresolvable CDI devices
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
  podman=5.4.2+ds1-2+b2 crun=1.21-1 catatonit=0.2.1-2+b14 >/dev/null
for package in archives/*.deb; do dpkg -x "$package" root; done

# The programs run in a root directory of their own, and without cgroups.
mkdir -p root/{etc/containers,image/bin,image/usr/lib,old,proc,root,run,sys,var/tmp}
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
exec chroot . env -i PATH=/usr/sbin:/usr/bin HOME=/root bash -c "$1"
END
# All processes end with the first one.
inside() { unshare --mount --net --pid --fork --kill-child sh inside.sh "$1"; }

mkdir root/etc/cdi
cat >root/ask.sh <<'END'
# The CDI file, whose device has this name and stands for this GPU.
generate() {
  printf '{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
    "devices": [{"name": "%s", "containerEdits": {"env": ["UUID=%s"]}}]}' "$1" "$2" >/etc/cdi/nvidia.json
}
look() {
  devices=$(podman inspect --format '{{range .HostConfig.Devices}}{{.PathOnHost}}{{else}}no device{{end}}' one)
  variable=$(podman inspect --format '{{join .Config.Env "\n"}}' one | busybox sed -n 's/^UUID=//p')
  echo "$1 $(podman logs one | busybox tail -n 1), inspect: $devices, $variable"
}
run() { podman start --attach one >/dev/null 2>error || busybox grep -o "unresolvable CDI devices" error; }
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
generate 1 GPU-1
podman create --name one --device nvidia.com/gpu=1 localhost/image sh -c 'echo "$UUID"' >/dev/null
run
look "created:                   "
generate 1 GPU-2
run
look "another GPU is 1:          "
generate 1 GPU-1
podman restart one >/dev/null
podman wait one >/dev/null
look "restart, file as at first: "
generate 0 GPU-1
echo "no 1 in the file:           $(run)"
END
inside ". /ask.sh" | tee seen
diff seen - <<'END'
created:                    GPU-1, inspect: no device, GPU-1
another GPU is 1:           GPU-2, inspect: no device, GPU-2
restart, file as at first:  GPU-1, inspect: no device, GPU-1
no 1 in the file:           unresolvable CDI devices
END
