#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1, buildah 1.39.3+ds1-1+b7 (Debian 13)
# Guess:     The driver's libraries are mounted into a container with a GPU, so an image that is made of it has
#            nothing of them, with "podman commit" as with a RUN of "buildah build".
# Behaviour: "podman commit" has an empty file for each, which only root can read: crun makes it as the place of the
#            mount, and it stays in the container's layer. buildah removes it after a RUN. On a node that mounts no
#            driver, or its libraries elsewhere, a program of that image does not say that libcuda.so.1 is missing,
#            and the loader does not go on to the next directory: the file is too short.
# Seen:
#   image: nothing
#   with the GPU: libcuda.so.1, 7 bytes, mode 644
#   podman commit: libcuda.so.1, 0 bytes, mode 700
#   buildah build: nothing, and /seen has: driver
#   the loader: file too short
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
  podman=5.4.2+ds1-2+b2 crun=1.21-1 buildah=1.39.3+ds1-1+b7 >/dev/null
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

mkdir root/etc/cdi
echo driver >root/driver
cat >root/etc/cdi/nvidia.json <<'END'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {"mounts": [
  {"hostPath": "/driver", "containerPath": "/usr/lib/libcuda.so.1", "options": ["ro", "rbind"]}]}}]}
END
mkdir root/build
cat >root/build/Containerfile <<'END'
FROM localhost/image
RUN ["sh", "-c", "cp /usr/lib/libcuda.so.1 /seen"]
END
cat >root/ask.sh <<'END'
look() {
  podman run --rm "$@" sh -c 'cd /usr/lib; stat -c "%n, %s bytes, mode %a" * 2>/dev/null || echo nothing'
}
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
echo "image: $(look localhost/image)"
echo "with the GPU: $(look --device nvidia.com/gpu=0 localhost/image)"
podman run --name one --device nvidia.com/gpu=0 localhost/image sh -c 'echo changed >/file'
podman commit --quiet one committed >/dev/null
echo "podman commit: $(look localhost/committed)"
buildah build --quiet --isolation oci --device nvidia.com/gpu=0 --network host --tag built /build >/dev/null
echo "buildah build: $(look localhost/built), and /seen has: $(podman run --rm localhost/built sh -c 'cat /seen')"
END
load='
import ctypes
try:
    ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print("the loader:", error.args[0].rpartition(": ")[2])
'
mkdir first second
: >first/libcuda.so.1
cp root/usr/lib/x86_64-linux-gnu/libz.so.1 second/libcuda.so.1
{
  inside ". /ask.sh"
  LD_LIBRARY_PATH=$directory/first:$directory/second python3 -c "$load"
} | tee seen
diff seen - <<'END'
image: nothing
with the GPU: libcuda.so.1, 7 bytes, mode 644
podman commit: libcuda.so.1, 0 bytes, mode 700
buildah build: nothing, and /seen has: driver
the loader: file too short
END
