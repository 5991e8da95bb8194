#!/bin/bash
# Packages:  apptainer 1.4.5-2 (Debian sid)
# Guess:     A container of Apptainer has the GPUs with --nv, and none without it or with NVIDIA_VISIBLE_DEVICES=void.
#            --nv finds the driver's libraries where the dynamic loader does, or says that it found none.
# Behaviour: The option is about libraries: without it the container has the host's whole /dev, so it can use the GPUs
#            with a driver of its own. Only --contain makes a small /dev. The variable counts for nothing. And --nv
#            asks ldconfig only: a driver in a directory of LD_LIBRARY_PATH, as clusters mount one and as it is in a
#            container that got its driver so, is not found, without a word, and the status is 0.
# Seen (the host has nvidia0 and nvidiactl, and libcuda.so.1 in the linker's cache or in LD_LIBRARY_PATH):
#   cache: nvidia0 nvidiactl, no library
#   cache, --nv: nvidia0 nvidiactl, libcuda.so.1
#   cache, --nv, NVIDIA_VISIBLE_DEVICES=void: nvidia0 nvidiactl, libcuda.so.1
#   cache, --contain: no node, no library
#   cache, --nv --contain: nvidia0 nvidiactl, libcuda.so.1
#   LD_LIBRARY_PATH, --nv: nvidia0 nvidiactl, no library
# Needs root and gcc. Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with sid's lists, in this directory only; sid has no updates and no security archive.
mkdir -p sources lists/partial archives/partial root
for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
  [ ! -f "$source" ] || sed -E "/^deb .* bookworm-/d; s/^(Suites: bookworm)-.*/\1-none\nEnabled: no/
    s/^Suites: bookworm .*/Suites: bookworm/; s/bookworm/sid/" "$source" >"sources/${source##*/}"
done
: >status
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::State::status=$PWD/status" -o "Dir::Cache=$PWD" -o APT::Install-Recommends=false
  -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" --yes --download-only install base-files bash busybox-static coreutils libc-bin \
  apptainer=1.4.5-2 >/dev/null
for package in archives/*.deb; do dpkg -x "$package" root; done

# A library without contents stands for the driver.
mkdir -p root/{opt/driver,proc,root,sys,old,image/{bin,dev,etc,proc,root,sys,tmp,var/tmp}}
echo 'int cuda;' >cuda.c
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o root/opt/driver/libcuda.so.1 cuda.c
cp root/usr/bin/busybox root/image/bin/sh
touch root/image/etc/{group,hosts,localtime,passwd,resolv.conf} root/etc/{hosts,localtime,resolv.conf}
printf 'root:x:0:0::/root:/bin/bash\n' >root/etc/passwd
printf 'root:x:0:\ntty:x:5:\n' >root/etc/group

cat >root/ask.sh <<'END'
ask() {
  echo "$1: $(apptainer exec --no-privs ${@:2} /image sh -c '
    cd /dev && nodes=$(echo nvidia*) && [ "$nodes" != "nvidia*" ] || nodes="no node"
    cd /.singularity.d/libs 2>/dev/null && libraries=$(echo *) || libraries="no library"
    echo "$nodes, $libraries"' 2>&1)"
}
echo /opt/driver >/etc/ld.so.conf
ldconfig
ask "cache"
ask "cache, --nv" --nv
NVIDIA_VISIBLE_DEVICES=void ask "cache, --nv, NVIDIA_VISIBLE_DEVICES=void" --nv
ask "cache, --contain" --contain
ask "cache, --nv --contain" --nv --contain
: >/etc/ld.so.conf
ldconfig
LD_LIBRARY_PATH=/opt/driver ask "LD_LIBRARY_PATH, --nv" --nv
END
# A root directory of its own, with a /dev of its own.
cat >inside.sh <<'END'
mount --bind root root
cd root
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount --rbind /sys sys
mount -t tmpfs tmpfs dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for name in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${name%:*}" "dev/${name#*:}"; done
for name in full null random tty urandom zero; do cp -a "/dev/$name" dev; done
mknod -m 666 dev/nvidia0 c 195 0
mknod -m 666 dev/nvidiactl c 195 255
pivot_root . old
busybox umount -l old
exec env -i PATH=/usr/sbin:/usr/bin HOME=/root bash /ask.sh
END
unshare --mount --net --pid --fork --kill-child sh inside.sh | tee seen
diff seen - <<'END'
cache: nvidia0 nvidiactl, no library
cache, --nv: nvidia0 nvidiactl, libcuda.so.1
cache, --nv, NVIDIA_VISIBLE_DEVICES=void: nvidia0 nvidiactl, libcuda.so.1
cache, --contain: no node, no library
cache, --nv --contain: nvidia0 nvidiactl, libcuda.so.1
LD_LIBRARY_PATH, --nv: nvidia0 nvidiactl, no library
END
