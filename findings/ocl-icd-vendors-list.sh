#!/bin/bash
# Package:   ocl-icd-libopencl1 2.3.1-1 (Debian 12)
# Guess:     OCL_ICD_VENDORS can name several directories with colons, as the variables of Vulkan's and EGL's loaders
#            can, so that a directory is added to the one that the variable has already.
# Behaviour: It names one directory, one manifest or one library. A list is taken for one name that does not exist, so
#            no platform is found, without a message. A driver can be added only by a file in that directory.
# Seen:
#   one directory:        first
#   one manifest:         first
#   one library:          first
#   list of directories:  no platform
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download ocl-icd-libopencl1=2.3.1-1
dpkg -x ocl-icd*.deb root
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu

# A library that says when it is loaded stands for a driver.
cat >driver.c <<'END'
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void tell(void) { (void)!write(1, NAME, strlen(NAME)); }
END
for name in first second; do
  gcc -shared -fPIC -DNAME="\"$name \"" -o "$name.so" driver.c
  mkdir "$name"
  echo "$directory/$name.so" >"$name/$name.icd"
done
cat >ask.py <<'END'
import ctypes

ctypes.CDLL("libOpenCL.so.1").clGetPlatformIDs(0, None, ctypes.byref(ctypes.c_uint()))
END
ask() {
  found=$(OCL_ICD_VENDORS=$2 python3 ask.py 2>&1 | sed 's/ $//')
  printf '%-21s %s\n' "$1:" "${found:-no platform}"
}
{
  ask 'one directory' "$directory/first"
  ask 'one manifest' "$directory/first/first.icd"
  ask 'one library' "$directory/first.so"
  ask 'list of directories' "$directory/first:$directory/second"
} | tee seen
diff seen - <<'END'
one directory:        first
one manifest:         first
one library:          first
list of directories:  no platform
END
