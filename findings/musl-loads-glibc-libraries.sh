#!/bin/bash
# Packages:  musl 1.2.3-1, musl-dev 1.2.3-1, libdrm2 2.4.114-1+b1, libffi8 3.4.4-1 (Debian 12)
# Guess:     A library that was linked with glibc cannot be loaded in an image with musl, such as Alpine's: its
#            libc.so.6 is not there.
# Behaviour: musl takes libc.so.6, libpthread.so.0, libdl.so.2, libm.so.6 and librt.so.1 for itself and ignores the
#            versions of symbols. So such a library loads if musl has all names that it needs, like libffi. If a name
#            is missing, it does not load with RTLD_NOW, and does with RTLD_LAZY. Then a program that only tests
#            whether dlopen succeeds takes the library for usable. (NVIDIA's libcuda and libnvidia-ml 535 load in the
#            same way: musl lacks three and four of their names.)
# Seen:
#   libffi.so.8, RTLD_NOW:  loaded
#   libffi.so.8, RTLD_LAZY: loaded
#   libdrm.so.2, RTLD_NOW:  a name is missing
#   libdrm.so.2, RTLD_LAZY: loaded
#   needed by both: libc.so.6
# Needs gcc, binutils and root.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download musl=1.2.3-1 musl-dev=1.2.3-1 libdrm2=2.4.114-1+b1 libffi8=3.4.4-1
for package in *.deb; do dpkg -x "$package" unpacked; done

cat >load.c <<'END'
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
static const char *load(const char *name, int mode) {
  if (dlopen(name, mode)) return "loaded";
  return strstr(dlerror(), "symbol not found") ? "a name is missing" : "not found";
}
int main(int count, char **words) {
  for (int i = 1; i < count; i++) {
    printf("%s, RTLD_NOW:  %s\n", words[i], load(words[i], RTLD_NOW));
    printf("%s, RTLD_LAZY: %s\n", words[i], load(words[i], RTLD_LAZY));
  }
  return 0;
}
END
parts=unpacked/usr/lib/x86_64-linux-musl loader=/lib/ld-musl-x86_64.so.1
mkdir -p root/lib
cp unpacked/lib/x86_64-linux-musl/libc.so root$loader
cp -L unpacked/usr/lib/x86_64-linux-gnu/lib{drm.so.2,ffi.so.8} root/lib
gcc -nostdinc -isystem unpacked/usr/include/x86_64-linux-musl -nostdlib -pie -o root/load \
  $parts/Scrt1.o $parts/crti.o load.c -Lunpacked/lib/x86_64-linux-musl -l:libc.so $parts/crtn.o \
  -Wl,-dynamic-linker,$loader
{
  chroot root /load libffi.so.8 libdrm.so.2
  needed=$(readelf -d root/lib/lib{drm.so.2,ffi.so.8} | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u)
  echo "needed by both: $needed"
} | tee seen
diff seen - <<'END'
libffi.so.8, RTLD_NOW:  loaded
libffi.so.8, RTLD_LAZY: loaded
libdrm.so.2, RTLD_NOW:  a name is missing
libdrm.so.2, RTLD_LAZY: loaded
needed by both: libc.so.6
END
