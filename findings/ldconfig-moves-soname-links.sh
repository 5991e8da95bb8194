#!/bin/bash
# Package:   libc-bin 2.36-9+deb12u14 (Debian 12)
# Guess:     ldconfig leaves the link libcuda.so.1 as it is if it leads to a library with that soname: it makes links
#            that are missing or broken.
# Behaviour: For each soname it takes the file whose name comes last of all lib*.so* with that soname, whatever the
#            link was, and changes the link. So a driver that the link names is replaced by another in the directory,
#            for example by a newer one that an image brought along, or by a file that is called by no version at
#            all. Package managers run ldconfig.
# Seen:
#   the link leads to the driver:    libcuda.so.535.309.01
#   after ldconfig:                  libcuda.so.550.163.01
#   with a libcuda_copy.so:          libcuda_copy.so
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download libc-bin=2.36-9+deb12u14
dpkg -x libc-bin*.deb root
mkdir libraries
echo 'int cuInit(unsigned flags) { return (int)flags; }' >driver.c
gcc -shared -fPIC -nostdlib -Wl,-soname,libcuda.so.1 -o libraries/libcuda.so.535.309.01 driver.c
cp libraries/libcuda.so.535.309.01 libraries/libcuda.so.550.163.01
ln -s libcuda.so.535.309.01 libraries/libcuda.so.1
look() { printf '%-32s %s\n' "$1:" "$(readlink libraries/libcuda.so.1)"; }
{
  look 'the link leads to the driver'
  root/sbin/ldconfig -n libraries
  look 'after ldconfig'
  cp libraries/libcuda.so.535.309.01 libraries/libcuda_copy.so
  root/sbin/ldconfig -n libraries
  look 'with a libcuda_copy.so'
} | tee seen
diff seen - <<'END'
the link leads to the driver:    libcuda.so.535.309.01
after ldconfig:                  libcuda.so.550.163.01
with a libcuda_copy.so:          libcuda_copy.so
END
