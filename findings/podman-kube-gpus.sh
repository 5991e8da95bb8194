#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     "podman kube play" gives a pod that asks for a GPU as in Kubernetes (limits: nvidia.com/gpu: 1) a GPU, or
#            refuses it. "podman kube generate" of a container with a GPU writes a pod that asks for it.
# Behaviour: The limit is ignored without a word, and the pod runs without a GPU. podman has its own form,
#            nvidia.com/gpu=1, which is the CDI device of that name; its value does not count: with 0 the pod has it,
#            too. The pod that "kube generate" writes does not mention the GPU.
# Seen (there are CDI devices 0 and 1):
#   limits: nvidia.com/gpu: 1: GPU none
#   limits: nvidia.com/gpu=1: 1: GPU 1
#   limits: nvidia.com/gpu=1: 0: GPU 1
#   limits: nvidia.com/gpu=2: 1: unresolvable CDI devices
#   kube generate: 0 lines with gpu
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
mount --rbind /dev root/dev
mount --rbind /sys root/sys
mount -t cgroup2 none root/sys/fs/cgroup
exec chroot root env -i PATH=/usr/sbin:/usr/bin HOME=/root bash -c "$1"
END
# All processes end with the first one.
inside() { unshare --mount --net --pid --fork --kill-child sh inside.sh "$1"; }

mkdir root/etc/cdi
cat >root/etc/cdi/nvidia.json <<'END'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
  {"name": "0", "containerEdits": {"env": ["GPU=0"]}}, {"name": "1", "containerEdits": {"env": ["GPU=1"]}}]}
END
cat >root/ask.sh <<'END'
tar() { busybox tar "$@"; }
tar -C /image -c . | podman import --quiet - image >/dev/null
for limit in "nvidia.com/gpu: 1" "nvidia.com/gpu=1: 1" "nvidia.com/gpu=1: 0" "nvidia.com/gpu=2: 1"; do
  cat >pod.yaml <<POD
apiVersion: v1
kind: Pod
metadata: {name: pod}
spec:
  hostNetwork: true
  restartPolicy: Never
  containers:
  - name: one
    image: localhost/image
    command: [sh, -c, 'echo "GPU \${GPU:-none}"']
    resources: {limits: {$limit}}
POD
  if podman kube play --no-hosts pod.yaml >output 2>&1; then
    podman wait pod-one >/dev/null
    echo "limits: $limit: $(podman logs pod-one)"
  else
    echo "limits: $limit: $(busybox grep -o 'unresolvable CDI devices' output || cat output)"
  fi
  podman pod rm --force pod >/dev/null
done
podman create --name two --device nvidia.com/gpu=1 localhost/image sh >/dev/null
podman kube generate two >pod.yaml
echo "kube generate: $(busybox grep -c -i gpu pod.yaml) lines with gpu"
podman rm two >/dev/null
END
inside ". /ask.sh" | tee seen
diff seen - <<'END'
limits: nvidia.com/gpu: 1: GPU none
limits: nvidia.com/gpu=1: 1: GPU 1
limits: nvidia.com/gpu=1: 0: GPU 1
limits: nvidia.com/gpu=2: 1: unresolvable CDI devices
kube generate: 0 lines with gpu
END
