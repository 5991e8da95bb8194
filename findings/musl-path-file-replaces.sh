#!/bin/bash
# Packages:  musl 1.2.3-1, musl-dev 1.2.3-1 (Debian 12)
# Guess:     A directory in /etc/ld-musl-x86_64.path is searched besides musl's usual directories, as one in
#            /etc/ld.so.conf is besides glibc's.
# Behaviour: The file replaces the usual directories: /lib, /usr/local/lib and /usr/lib are searched no longer, unless
#            the file lists them. To add a directory for a driver one has to write down the usual ones, too.
# Seen:
#   without the file:   /lib /usr/local/lib /usr/lib
#   with /opt/driver:   /opt/driver
# Needs gcc, strace and root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download musl=1.2.3-1 musl-dev=1.2.3-1
for package in *.deb; do dpkg -x "$package" unpacked; done

cat >load.c <<'END'
#include <dlfcn.h>
int main(void) { return dlopen("libdriver.so.1", RTLD_NOW) != 0; }
END
parts=unpacked/usr/lib/x86_64-linux-musl loader=/lib/ld-musl-x86_64.so.1
mkdir -p root/lib root/etc
cp unpacked/lib/x86_64-linux-musl/libc.so root$loader
gcc -nostdinc -isystem unpacked/usr/include/x86_64-linux-musl -nostdlib -pie -o root/load \
  $parts/Scrt1.o $parts/crti.o load.c -Lunpacked/lib/x86_64-linux-musl -l:libc.so $parts/crtn.o \
  -Wl,-dynamic-linker,$loader
look() {
  strace -f -qq -e trace=open,openat -o trace chroot root /load
  printf '%-19s %s\n' "$1:" "$(sed -n 's|.*"\(.*\)/libdriver.so.1".*|\1|p' trace | paste -sd' ')"
}
{
  look 'without the file'
  echo /opt/driver >root/etc/ld-musl-x86_64.path
  look 'with /opt/driver'
} | tee seen
diff seen - <<'END'
without the file:   /lib /usr/local/lib /usr/lib
with /opt/driver:   /opt/driver
END
