#!/bin/bash
# Packages:  libc6 2.36-9+deb12u14, musl 1.2.3-1, musl-dev 1.2.3-1 (Debian 12)
# Guess:     The dynamic loader skips what is no library, as it skips one of another architecture or a dangling link,
#            and goes on with the next directory of LD_LIBRARY_PATH.
# Behaviour: An empty file or a folder with the library's name ends the search: the driver in the next directory is not
#            loaded, and the error names only the wrong one. Both occur: an image that was committed from a running GPU
#            container has empty files where the driver was mounted, and "docker run -v" makes a folder for a path
#            that the host lacks. glibc and musl do the same.
# Seen:
#   glibc, an empty file first:            file too short
#   glibc, a folder first:                 cannot read file data: Is a directory
#   glibc, another architecture first:     loaded
#   glibc, a dangling link first:          loaded
#   musl, an empty file first:             Exec format error
#   musl, a folder first:                  Is a directory
#   musl, a dangling link first:           loaded
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download libc6=2.36-9+deb12u14 musl=1.2.3-1 musl-dev=1.2.3-1
for package in *.deb; do dpkg -x "$package" root; done

cat >load.c <<'END'
#include <dlfcn.h>
#include <stdio.h>
int main(void) { return puts(dlopen("libdriver.so.1", RTLD_NOW) ? "loaded" : dlerror()) < 0; }
END
gcc -o load-glibc load.c
parts=root/usr/lib/x86_64-linux-musl libc=root/lib/x86_64-linux-musl/libc.so glibc=root/lib/x86_64-linux-gnu
gcc -nostdinc -isystem root/usr/include/x86_64-linux-musl -nostdlib -pie -o load-musl \
  $parts/Scrt1.o $parts/crti.o load.c $libc $parts/crtn.o -Wl,-dynamic-linker,"$directory/$libc"

mkdir -p driver empty folder/libdriver.so.1 architecture dangling
echo 'int driver(void) { return 1; }' >driver.c
gcc -shared -fPIC -nostdlib -Wl,-soname,libdriver.so.1 -o driver/libdriver.so.1 driver.c
: >empty/libdriver.so.1
ln -s /nonexistent dangling/libdriver.so.1
# The machine in the header: 183 is AArch64.
cp driver/libdriver.so.1 architecture/
printf '\267\000' | dd of=architecture/libdriver.so.1 bs=1 seek=18 conv=notrunc status=none

look() {
  run=(./load-musl)
  [ "$1" = musl ] || run=("$glibc/ld-linux-x86-64.so.2" ./load-glibc)
  printf '%-38s %s\n' "$1, $2 first:" \
    "$(LD_LIBRARY_PATH=$directory/$3:$directory/driver:$directory/$glibc "${run[@]}" | sed 's/.*libdriver.so.1: //')"
}
{
  look glibc 'an empty file' empty
  look glibc 'a folder' folder
  look glibc 'another architecture' architecture
  look glibc 'a dangling link' dangling
  look musl 'an empty file' empty
  look musl 'a folder' folder
  look musl 'a dangling link' dangling
} | tee seen
diff seen - <<'END'
glibc, an empty file first:            file too short
glibc, a folder first:                 cannot read file data: Is a directory
glibc, another architecture first:     loaded
glibc, a dangling link first:          loaded
musl, an empty file first:             Exec format error
musl, a folder first:                  Is a directory
musl, a dangling link first:           loaded
END
