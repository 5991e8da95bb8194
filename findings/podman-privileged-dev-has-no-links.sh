#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     A privileged container has the host's /dev: what finds a GPU there on the host finds it in the container.
# Behaviour: It has the host's device nodes and no links, for which a spec has no field. So the stable names of
#            /dev/dri/by-path are not there, by which one tells the GPUs of /dev/dri apart, and nothing of /dev/char.
#            The nodes are copies of the time of the start: one that the host makes later, as nvidia-uvm once its
#            module is loaded, is missing. A volume for /dev has both.
# Seen:
#   host: dri/by-path/pci-0000:01:00.0-render dri/renderD128 char/195:0 nvidia0 nvidia-caps/nvidia-cap1
#   --privileged: dri/renderD128 nvidia0 nvidia-caps/nvidia-cap1
#   --volume /dev:/dev: dri/by-path/pci-0000:01:00.0-render dri/renderD128 char/195:0 nvidia0 nvidia-caps/nvidia-cap1
#   a node made after the start: not in --privileged, in --volume /dev:/dev
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
mount --rbind /sys root/sys
mount -t cgroup2 none root/sys/fs/cgroup
# A /dev with GPUs.
mount -t tmpfs tmpfs root/dev
cd root/dev
mkdir -p pts shm mqueue dri/by-path char nvidia-caps
mount -t devpts -o newinstance,ptmxmode=666 devpts pts
mount -t tmpfs tmpfs shm
ln -s pts/ptmx ptmx
ln -s /proc/self/fd fd
for name in full null random tty urandom zero; do cp -a "/dev/$name" .; done
mknod dri/renderD128 c 226 128
ln -s ../renderD128 dri/by-path/pci-0000:01:00.0-render
mknod nvidia0 c 195 0
ln -s ../nvidia0 char/195:0
mknod nvidia-caps/nvidia-cap1 c 240 1
cd ..
mkdir -p old
pivot_root . old
busybox umount -l old
exec env -i PATH=/usr/sbin:/usr/bin HOME=/root bash -c "$1"
END
# All processes end with the first one.
inside() { unshare --mount --net --pid --fork --kill-child sh inside.sh "$1"; }

cat >root/ask.sh <<'END'
tar() { busybox tar "$@"; }
tar -C /image -c . | podman import --quiet - image >/dev/null
LOOK='cd /dev; for name in dri/by-path/* dri/render* char/* nvidia0 nvidia-caps/* nvidia-uvm; do
  [ ! -e "$name" ] || echo "$name"; done'
all() { echo $("$@"); }
echo "host: $(all bash -c "$LOOK")"
echo "--privileged: $(all podman run --rm --privileged image sh -c "$LOOK")"
echo "--volume /dev:/dev: $(all podman run --rm --privileged --volume /dev:/dev image sh -c "$LOOK")"
podman run --detach --name copy --privileged image sh -c 'while :; do sleep 1; done' >/dev/null
podman run --detach --name volume --privileged --volume /dev:/dev image sh -c 'while :; do sleep 1; done' >/dev/null
busybox mknod /dev/nvidia-uvm c 510 0
has() { podman exec "$1" sh -c "$LOOK" | busybox grep -q uvm && echo in || echo not in; }
echo "a node made after the start: $(has copy) --privileged, $(has volume) --volume /dev:/dev"
podman rm --force --time 0 copy volume >/dev/null
END
inside ". /ask.sh" | tee seen
diff seen - <<'END'
host: dri/by-path/pci-0000:01:00.0-render dri/renderD128 char/195:0 nvidia0 nvidia-caps/nvidia-cap1
--privileged: dri/renderD128 nvidia0 nvidia-caps/nvidia-cap1
--volume /dev:/dev: dri/by-path/pci-0000:01:00.0-render dri/renderD128 char/195:0 nvidia0 nvidia-caps/nvidia-cap1
a node made after the start: not in --privileged, in --volume /dev:/dev
END
