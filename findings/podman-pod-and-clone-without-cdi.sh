#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1, catatonit 0.2.1-2+b3 (Debian 13)
# Guess:     "podman pod create --device" gives a CDI device to the containers of the pod, as it gives a device node,
#            and "podman container clone" makes a container with the same GPU; or there is an error.
# Behaviour: Only device nodes get there. Of a CDI device the containers of the pod have nothing: only the pod's infra
#            container, which runs no program of the user, has it. A clone has none either. Both succeed without a word.
# Seen (each asked for the CDI device, which has a variable and a node, and for the node /dev/one):
#   run:              FROM=cdi /dev/nvidia0 /dev/one
#   clone of it:      FROM= /dev/one
#   container in pod: FROM= /dev/one
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
  podman=5.4.2+ds1-2+b2 crun=1.21-1 catatonit >/dev/null
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
[network]
firewall_driver = "none"
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
cat >root/etc/cdi/nvidia.json <<'END'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {
  "env": ["FROM=cdi"], "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/zero"}]}}]}
END

cat >root/ask.sh <<'END'
look='echo FROM=$FROM; ls /dev/nvidia0 /dev/one 2>/dev/null'
# show TITLE COMMAND...
show() { printf '%-17s %s\n' "$1:" "$("${@:2}" | busybox tr '\n' ' ' | busybox sed 's/ $//')"; }
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
devices=(--device nvidia.com/gpu=0 --device /dev/zero:/dev/one)
podman create --name one --network none "${devices[@]}" localhost/image sh -c "$look" >/dev/null
show run podman start --attach one
podman container clone --name two one >/dev/null
show 'clone of it' podman start --attach two
podman pod create --name pod --network none "${devices[@]}" >/dev/null
show 'container in pod' podman run --rm --pod pod localhost/image sh -c "$look"
podman pod rm --force --time 0 pod >/dev/null
END
# All processes end with the first one.
unshare --mount --net --pid --fork --kill-child sh inside.sh | tee seen
diff seen - <<'END'
run:              FROM=cdi /dev/nvidia0 /dev/one
clone of it:      FROM= /dev/one
container in pod: FROM= /dev/one
END
