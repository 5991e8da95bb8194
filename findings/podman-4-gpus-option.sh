#!/bin/bash
# Packages:  podman 4.3.1+ds1-8+deb12u1+b3, crun 1.8.1-1+deb12u1, conmon 2.1.6+ds1-1 (Debian 12)
# Guess:     If podman takes "--gpus all" it gives the container the GPUs, as podman 5 does; a podman that cannot do
#            that refuses the option.
# Behaviour: podman 4.3 takes the option, for scripts that were written for docker, and does nothing with it, whatever
#            its value is. The container runs without a GPU and without a warning, though "--device
#            nvidia.com/gpu=all" works with the same podman.
# Seen (there is a CDI device "all"):
#   --gpus all: GPU none, status 0, nothing on stderr
#   --gpus nonsense: GPU none, status 0, nothing on stderr
#   --device nvidia.com/gpu=all: GPU all, status 0, nothing on stderr
#   --device nvidia.com/gpu=nonsense: unresolvable CDI devices
# Needs root. Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download podman=4.3.1+ds1-8+deb12u1+b3 crun=1.8.1-1+deb12u1 conmon=2.1.6+ds1-1 libassuan0=2.5.5-5 \
  libdevmapper1.02.1=2:1.02.185-2 libglib2.0-0 libgpgme11=1.18.0-3+b1 libseccomp2=2.5.4-1+deb12u1 libsubid4 \
  libyajl2=2.1.0-3+deb12u2 busybox-static=1:1.35.0-4+deb12u1+b1
for package in *.deb; do dpkg -x "$package" root; done

mkdir -p rootfs/{bin,dev,etc,proc,sys} home
cp root/bin/busybox rootfs/bin/sh
cat >containers.conf <<END
[containers]
cgroups = "disabled"
default_ulimits = ["nofile=512:512", "nproc=512:512"]
log_driver = "none"
netns = "none"
seccomp_profile = "unconfined"
[engine]
cgroup_manager = "cgroupfs"
conmon_path = ["$directory/root/usr/bin/conmon"]
events_logger = "none"
runtime = "crun"
[engine.runtimes]
crun = ["$directory/root/usr/bin/crun"]
END
cat >storage.conf <<END
[storage]
driver = "vfs"
graphroot = "$directory/store"
runroot = "$directory/run"
END
cat >ask.sh <<'END'
# The programs see no /run and no cgroups of this machine.
mount -t tmpfs tmpfs /run
umount --lazy /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mkdir /run/cdi
echo '{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
  {"name": "all", "containerEdits": {"env": ["GPU=all"]}}]}' >/run/cdi/nvidia.json
for option in "--gpus all" "--gpus nonsense" "--device nvidia.com/gpu=all" "--device nvidia.com/gpu=nonsense"; do
  # Without quotes: the option and its value.
  # shellcheck disable=SC2086
  if root/usr/bin/podman run --rm $option --rootfs "$PWD/rootfs" sh -c 'echo "GPU ${GPU:-none}"' >out 2>err; then
    echo "$option: $(cat out), status 0, $([ -s err ] && cat err || echo nothing) on stderr"
  else
    echo "$option: $(grep -o 'unresolvable CDI devices' err || cat err)"
  fi
done
END
export CONTAINERS_CONF=$directory/containers.conf CONTAINERS_STORAGE_CONF=$directory/storage.conf
export HOME=$directory/home
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu:$directory/root/lib/x86_64-linux-gnu
# All processes end with the first one.
unshare --mount --net --pid --fork --kill-child --mount-proc sh ask.sh | tee seen
diff seen - <<'END'
--gpus all: GPU none, status 0, nothing on stderr
--gpus nonsense: GPU none, status 0, nothing on stderr
--device nvidia.com/gpu=all: GPU all, status 0, nothing on stderr
--device nvidia.com/gpu=nonsense: unresolvable CDI devices
END
