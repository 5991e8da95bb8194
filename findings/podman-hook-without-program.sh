#!/bin/bash
# Packages:  podman 5.4.2+ds1-2+b2, crun 1.21-1 (Debian 13)
# Guess:     podman refuses to start a container if a hook of its hook directory, as NVIDIA's older packages installed,
#            cannot run because its program is not there, as runc and crun do with a hook in a spec. A misspelled
#            condition is an error, and "always" is always.
# Behaviour: A hook whose program is missing is left out without a word, and the container starts without a GPU. A
#            condition with an unknown name never holds. "always" holds only together with the other conditions. A wrong
#            stage is an error for every container.
# Seen:
#   hook with its program:                status 0, hook ran
#   hook whose program is not there:      status 0, no hook
#   misspelled condition ("alwasy"):      status 0, no hook
#   always, and a command that is not:    status 0, no hook
#   misspelled stage ("createruntime"):   status 126, no hook
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
mkdir -p /usr/share/containers/oci/hooks.d
printf '#!/bin/busybox sh\necho hook ran >/ran\n' >/usr/bin/nvidia-hook
chmod +x /usr/bin/nvidia-hook
# ask TITLE PROGRAM CONDITION STAGE
ask() {
  busybox rm -f /ran
  echo '{"version": "1.0.0", "hook": {"path": "'"$2"'"}, "when": {'"$3"'}, "stages": ["'"$4"'"]}' \
    >/usr/share/containers/oci/hooks.d/nvidia.json
  status=0
  podman run --rm localhost/image sh -c : 2>/dev/null || status=$?
  printf '%-37s %s\n' "$1:" "status $status, $(cat /ran 2>/dev/null || echo no hook)"
}
ask 'hook with its program' /usr/bin/nvidia-hook '"always": true' createRuntime
ask 'hook whose program is not there' /usr/bin/nvidia-hooks '"always": true' createRuntime
ask 'misspelled condition ("alwasy")' /usr/bin/nvidia-hook '"alwasy": true' createRuntime
ask 'always, and a command that is not' /usr/bin/nvidia-hook '"always": true, "commands": ["python$"]' createRuntime
ask 'misspelled stage ("createruntime")' /usr/bin/nvidia-hook '"always": true' createruntime
END
# All processes end with the first one.
unshare --mount --net --pid --fork --kill-child sh inside.sh | tee seen
diff seen - <<'END'
hook with its program:                status 0, hook ran
hook whose program is not there:      status 0, no hook
misspelled condition ("alwasy"):      status 0, no hook
always, and a command that is not:    status 0, no hook
misspelled stage ("createruntime"):   status 126, no hook
END
