#!/bin/bash
# Packages:  python3.11-minimal, libpython3.11-minimal and libpython3.11-stdlib 3.11.2-6+deb12u9,
#            binutils-x86-64-linux-gnu 2.40-2 (Debian 12)
# Guess:     ctypes.util.find_library(), by which Python packages look for libcuda, EGL and GL, either searches
#            LD_LIBRARY_PATH or does not.
# Behaviour: It depends on the programs in the image. Python asks `ldconfig -p`, which knows nothing of the variable,
#            and then gcc, and then ld, which gets the directories. So with binutils the library is found, if the name
#            without a version is there too; in a slim image it is not, though the dynamic loader finds it.
# Seen:
#   dlopen:                             loaded
#   find_library, without binutils:     None
#   find_library, with binutils:        libdriver.so.1
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

version=3.11.2-6+deb12u9
apt-get -qq download python3.11-minimal=$version libpython3.11-minimal=$version libpython3.11-stdlib=$version \
  binutils-x86-64-linux-gnu=2.40-2 libbinutils=2.40-2 libctf0=2.40-2 libctf-nobfd0=2.40-2 libjansson4 libgprofng0
for package in *.deb; do dpkg -x "$package" root; done

mkdir libraries programs
echo 'int driver(void) { return 0; }' >driver.c
gcc -shared -fPIC -nostdlib -Wl,-soname,libdriver.so.1 -o libraries/libdriver.so.1 driver.c
ln -s libdriver.so.1 libraries/libdriver.so
for program in ld objdump; do ln -s "$directory/root/usr/bin/x86_64-linux-gnu-$program" "programs/$program"; done
export LD_LIBRARY_PATH=$directory/libraries:$directory/root/usr/lib/x86_64-linux-gnu PYTHONHOME=$directory/root/usr

ask() {
  printf '%-35s %s\n' "$1:" "$(PATH=$2 "$directory/root/usr/bin/python3.11" -c "
import ctypes, ctypes.util
print($3)")"
}
{
  ask 'dlopen' /nonexistent 'ctypes.CDLL("libdriver.so.1") and "loaded"'
  ask 'find_library, without binutils' /nonexistent 'ctypes.util.find_library("driver")'
  ask 'find_library, with binutils' "$directory/programs" 'ctypes.util.find_library("driver")'
} | tee seen
diff seen - <<'END'
dlopen:                             loaded
find_library, without binutils:     None
find_library, with binutils:        libdriver.so.1
END
