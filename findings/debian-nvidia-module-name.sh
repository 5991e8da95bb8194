#!/bin/bash
# Packages:  nvidia-kernel-support and nvidia-kernel-dkms 535.309.01-0+deb12u1, kmod 30+20221128-1 (Debian 12)
# Guess:     Where "modprobe nvidia" loads NVIDIA's module, "modinfo nvidia" knows it, and nvidia.ko is its file: that
#            is how a program asks whether a driver is installed, and of which version, before it is loaded.
# Behaviour: Debian's file is nvidia-current.ko. "modprobe nvidia" works by an install command, which modinfo does not
#            read: it says that there is no module. initramfs-tools asks modprobe for the files and gets none, without
#            an error, so "nvidia" in /etc/initramfs-tools/modules adds nothing. Once the module is loaded it is called
#            nvidia again, as the name inside the file says.
# Seen:
#   modprobe nvidia:                  install modprobe -i nvidia-current
#   modinfo nvidia:                   modinfo: ERROR: Module nvidia not found.
#   modinfo nvidia-current:           535.309.01, name nvidia
#   initramfs-tools, nvidia:          no file
#   initramfs-tools, nvidia-current:  nvidia-current.ko
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with the lists of this machine's archive and its non-free parts, in this directory only.
mkdir -p sources lists/partial archives/partial
for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
  [ ! -f "$source" ] || sed -E "s/^(Components:|deb .* bookworm[^ ]*) main.*/\1 main contrib non-free/" \
    "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download nvidia-kernel-support=535.309.01-0+deb12u1 nvidia-kernel-dkms=535.309.01-0+deb12u1 \
  kmod=30+20221128-1 libkmod2=30+20221128-1
for package in *.deb; do dpkg -x "$package" root; done

# A module of the driver's name, at the place that the package's dkms.conf says.
cat >module.c <<'END'
#define ENTRY(name, text) static const char name[] __attribute__((section(".modinfo"), used)) = text
ENTRY(a, "name=nvidia");
ENTRY(b, "version=535.309.01");
ENTRY(c, "vermagic=6.1.0 SMP");
END
modules=lib/modules/6.1.0
mkdir -p $modules/updates/dkms configuration
touch $modules/modules.{order,builtin,builtin.modinfo}
package=$(sed -nE 's/^PACKAGE_NAME="(.*)"/\1/p' root/usr/src/*/dkms.conf)
name=$(sed -nE 's/^DEST_MODULE_NAME\[0\]="\$PACKAGE_NAME(.*)"/'"$package"'\1/p' root/usr/src/*/dkms.conf)
gcc -c module.c -o "$modules/updates/dkms/$name.ko"
cp root/etc/nvidia/current/nvidia-modprobe.conf configuration/nvidia.conf
for program in depmod modprobe modinfo; do ln -s root/bin/kmod $program; done
export LD_LIBRARY_PATH=$PWD/root/lib/x86_64-linux-gnu:$PWD/root/usr/lib/x86_64-linux-gnu
./depmod --basedir . 6.1.0

show() { printf '%-33s %s\n' "$1:" "$2"; }
load=(./modprobe --dirname . --config configuration --set-version 6.1.0)
# What initramfs-tools reads: the files of both answers.
depends() {
  found=$(for option in --ignore-install --all; do "${load[@]}" --all $option --quiet --show-depends "$1"; done |
    sed -nE 's,^insmod .*/([^ ]+) *$,\1,p' | sort --unique)
  echo "${found:-no file}"
}
information=(./modinfo --basedir . --set-version 6.1.0)
{
  show 'modprobe nvidia' "$("${load[@]}" --dry-run --verbose nvidia | sed 's/ \$CMDLINE_OPTS *$//')"
  show 'modinfo nvidia' "$("${information[@]}" nvidia 2>&1 || true)"
  show 'modinfo nvidia-current' \
    "$("${information[@]}" -F version nvidia-current), name $("${information[@]}" -F name nvidia-current)"
  show 'initramfs-tools, nvidia' "$(depends nvidia)"
  show 'initramfs-tools, nvidia-current' "$(depends nvidia-current)"
} | tee seen
diff seen - <<'END'
modprobe nvidia:                  install modprobe -i nvidia-current
modinfo nvidia:                   modinfo: ERROR: Module nvidia not found.
modinfo nvidia-current:           535.309.01, name nvidia
initramfs-tools, nvidia:          no file
initramfs-tools, nvidia-current:  nvidia-current.ko
END
