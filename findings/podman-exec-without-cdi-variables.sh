#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     A process of "podman exec" has the container's environment, with the variables of its CDI devices: it has
#            the device nodes, and "podman inspect" shows these variables in Config.Env.
# Behaviour: It has the nodes and not the variables. So a program that finds the driver or its GPU by a variable of CDI,
#            as the search path of a driver in a directory of its own, works as the container's command and not in
#            "podman exec", which is how people look for the reason.
# Seen:
#   run:      FROM=cdi, /dev/nvidia0
#   exec:     FROM=, /dev/nvidia0
#   inspect:  FROM=cdi
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
cat >root/etc/cdi/nvidia.json <<'END'
{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {
  "env": ["FROM=cdi"], "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/zero"}]}}]}
END

cat >root/ask.sh <<'END'
look='ls /dev/nvidia0 >/dev/null && echo "FROM=$FROM, /dev/nvidia0"'
busybox tar -C /image -c . | podman import --quiet - image >/dev/null
podman run --detach --name gpu --device nvidia.com/gpu=0 localhost/image \
  sh -c "$look; trap exit TERM; while :; do sleep 1; done" >/dev/null
echo "exec:     $(podman exec gpu sh -c "$look")" >exec
echo "run:      $(podman logs gpu)"
cat exec
echo "inspect:  $(podman inspect --format '{{range .Config.Env}}{{println .}}{{end}}' gpu | busybox grep FROM)"
podman rm --force --time 0 gpu >/dev/null
END
# All processes end with the first one.
unshare --mount --net --pid --fork --kill-child sh inside.sh | tee seen
diff seen - <<'END'
run:      FROM=cdi, /dev/nvidia0
exec:     FROM=, /dev/nvidia0
inspect:  FROM=cdi
END
