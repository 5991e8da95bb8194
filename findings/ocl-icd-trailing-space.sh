#!/bin/bash
# Package:   ocl-icd-libopencl1 2.3.1-1 (Debian 12)
# Guess:     A manifest (/etc/OpenCL/vendors/*.icd) has the library's name in a line; spaces around it, the carriage
#            return of a file that was edited on Windows, and lines with # do not matter.
# Behaviour: The first line is the name to the byte, except for the newline. With a space or a carriage return behind
#            the name the driver is left out without a message, and so it is if a comment comes first. A second line
#            with another library is ignored.
# Seen:
#   name:                          driver loaded
#   name without a newline:        driver loaded
#   name and a space:              no platform
#   name and a carriage return:    no platform
#   comment, then the name:        no platform
#   name, then another line:       driver loaded
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download ocl-icd-libopencl1=2.3.1-1
dpkg -x ocl-icd*.deb root
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu OCL_ICD_VENDORS=$directory/vendors
mkdir vendors

# A library that says when it is loaded stands for a driver.
cat >driver.c <<'END'
#include <unistd.h>
__attribute__((constructor)) static void tell(void) { (void)!write(1, "driver loaded", 13); }
END
gcc -shared -fPIC -o driver.so driver.c
cat >ask.py <<'END'
import ctypes

ctypes.CDLL("libOpenCL.so.1").clGetPlatformIDs(0, None, ctypes.byref(ctypes.c_uint()))
END
ask() {
  # shellcheck disable=SC2059
  printf "$2" "$directory/driver.so" >vendors/driver.icd
  found=$(python3 ask.py 2>&1)
  printf '%-30s %s\n' "$1:" "${found:-no platform}"
}
{
  ask 'name' '%s\n'
  ask 'name without a newline' '%s'
  ask 'name and a space' '%s \n'
  ask 'name and a carriage return' '%s\r\n'
  ask 'comment, then the name' '# a driver\n%s\n'
  ask 'name, then another line' '%s\nlibother.so\n'
} | tee seen
diff seen - <<'END'
name:                          driver loaded
name without a newline:        driver loaded
name and a space:              no platform
name and a carriage return:    no platform
comment, then the name:        no platform
name, then another line:       driver loaded
END
