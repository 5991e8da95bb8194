#!/bin/bash
# Packages:  docker.io 20.10.24+dfsg1-1+deb12u1+b6 (Debian 12), podman 5.4.2+ds1-2+b2, crun 1.21-1 (13)
# Guess:     "docker run --gpus all" with podman's service instead of Docker's gives the container the GPUs, for which
#            podman has "--gpus" itself, or is an error, as in Docker without NVIDIA's hook.
# Behaviour: The container starts without a GPU and without a message. podman's service drops every device request of
#            Docker's API whose driver is not "cdi". The same holds for programs with that API, as Docker's Compose.
#            Only "--gpus driver=cdi,device=NAME" works. Later versions of podman (5.8) do the same.
# Seen (there is a CDI device "all"):
#   podman run --gpus all: GPU all
#   docker run --gpus all: GPU none
#   docker run --gpus device=all: GPU none
#   docker run --gpus driver=nvidia: GPU none
#   docker run --gpus driver=cdi,device=nvidia.com/gpu=all: GPU all
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

# Docker's client needs only libc; its package is Debian 12's.
apt-get -qq download docker.io=20.10.24+dfsg1-1+deb12u1+b6
dpkg -x docker.io_*.deb docker
cp docker/usr/bin/docker root/usr/bin/docker
mkdir root/etc/cdi
cat >root/etc/cdi/nvidia.json <<'END'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": {"env": ["GPU=all"]}}]}
END
cat >root/ask.sh <<'END'
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
podman system service --time 0 unix:///run/podman.sock 2>service.log &
for _ in {1..100}; do
  [ -S /run/podman.sock ] && break
  sleep 0.1
done
export DOCKER_HOST=unix:///run/podman.sock
ask() {
  echo "$*: $("$@" --network none localhost/image sh -c 'echo "GPU ${GPU:-none}"' 2>&1)"
}
ask podman run --gpus all
ask docker run --gpus all
ask docker run --gpus device=all
ask docker run --gpus driver=nvidia
ask docker run --gpus driver=cdi,device=nvidia.com/gpu=all
END
inside ". /ask.sh" | tee seen
diff seen - <<'END'
podman run --gpus all: GPU all
docker run --gpus all: GPU none
docker run --gpus device=all: GPU none
docker run --gpus driver=nvidia: GPU none
docker run --gpus driver=cdi,device=nvidia.com/gpu=all: GPU all
END
