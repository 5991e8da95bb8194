#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, buildah 1.39.3+ds1-1+b7, crun 1.21-1 (Debian 13)
# Guess:     "podman build --device nvidia.com/gpu=0" runs each RUN with the GPU: the result of an earlier build without
#            it, or with another one, is not taken from the cache, as it is not for another build argument.
# Behaviour: Neither --device nor --volume counts for the cache. So a RUN that asks for the GPU, as to compile for its
#            kind or to measure it, keeps what it found in the first build: without a GPU for ever, on the same machine.
#            "podman build" caches by default, "buildah build" with --layers; --no-cache helps.
# Seen (what a RUN finds, and whether it comes from the cache; each row builds in this order):
#   podman build:  no device: none; gpu=0: none, cached; gpu=1: none, cached; gpu=1, --no-cache: 1
#   buildah build: no device: none; gpu=0: none, cached; gpu=1: none, cached; gpu=1, --no-cache: 1
#   podman build, --volume: /one: one; /two: one, cached; /two, --no-cache: two
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
  podman=5.4.2+ds1-2+b2 crun=1.21-1 buildah=1.39.3+ds1-1+b7 catatonit=0.2.1-2+b14 >/dev/null
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

mkdir -p root/etc/cdi root/{gpu,volume,one,two}
cat >root/etc/cdi/nvidia.json <<'END'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
  {"name": "0", "containerEdits": {"env": ["GPU=0"]}}, {"name": "1", "containerEdits": {"env": ["GPU=1"]}}]}
END
printf 'FROM localhost/image\nRUN echo "${GPU:-none}" >/found\n' >root/gpu/Containerfile
printf 'FROM localhost/image\nRUN read line </volume/file; echo "$line" >/found\n' >root/volume/Containerfile
for name in one two; do echo $name >root/$name/file; done
cat >root/ask.sh <<'END'
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
# Build a directory with a command, and print what is in the image.
build() {
  "${@:2}" --network none --tag found "$1" >output 2>&1 || cat output
  container=$(podman create localhost/found sh)
  printf '%s' "$(podman export "$container" | busybox tar -xO found)"
  podman rm "$container" >/dev/null
  ! busybox grep -q 'Using cache' output || printf ', cached'
}
for tool in "podman build" "buildah build --layers"; do
  printf '%-14s no device: %s' "${tool% --layers}:" "$(build /gpu $tool)"
  for number in 0 1; do printf '; gpu=%s: %s' $number "$(build /gpu $tool --device nvidia.com/gpu=$number)"; done
  echo "; gpu=1, --no-cache: $(build /gpu $tool --device nvidia.com/gpu=1 --no-cache)"
  podman rmi --all --force >/dev/null
  busybox tar -C /image -c . | podman import --quiet - image >/dev/null
done
printf 'podman build, --volume:'
for name in one two; do printf ' /%s: %s;' $name "$(build /volume podman build --volume /$name:/volume)"; done
echo " /two, --no-cache: $(build /volume podman build --volume /two:/volume --no-cache)"
END
inside ". /ask.sh" | tee seen
diff seen - <<'END'
podman build:  no device: none; gpu=0: none, cached; gpu=1: none, cached; gpu=1, --no-cache: 1
buildah build: no device: none; gpu=0: none, cached; gpu=1: none, cached; gpu=1, --no-cache: 1
podman build, --volume: /one: one; /two: one, cached; /two, --no-cache: two
END
