#!/bin/bash
# Packages:  libvulkan1 1.3.239.0-1, libegl1 and libglvnd0 1.6.0-1, ocl-icd-libopencl1 2.3.1-1 (Debian 12)
# Guess:     The variable that names the drivers counts as not set if it is empty, for each of these loaders: a pod
#            or a Dockerfile often sets a variable to "" in order to undo it.
# Behaviour: Only OpenCL's loader does so. For Vulkan and EGL an empty variable is a list without a driver: no driver
#            is loaded, and nothing is printed. (VK_ADD_DRIVER_FILES, which adds drivers, may be empty.)
# Seen:
#   Vulkan, VK_DRIVER_FILES:               unset: driver loaded; empty: no driver
#   Vulkan, VK_ADD_DRIVER_FILES:           unset: driver loaded; empty: driver loaded
#   EGL, __EGL_VENDOR_LIBRARY_FILENAMES:   unset: driver loaded; empty: no driver
#   EGL, __EGL_VENDOR_LIBRARY_DIRS:        unset: /usr/share/glvnd searched; empty: not searched
#   OpenCL, OCL_ICD_VENDORS:               unset: /etc/OpenCL searched; empty: /etc/OpenCL searched
# Needs gcc and strace.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download libvulkan1=1.3.239.0-1 libegl1=1.6.0-1 libglvnd0=1.6.0-1 ocl-icd-libopencl1=2.3.1-1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu HOME=/nonexistent

# A library that says when it is loaded stands for a driver.
cat >driver.c <<'END'
#include <unistd.h>
__attribute__((constructor)) static void tell(void) { (void)!write(1, "driver loaded", 13); }
END
gcc -shared -fPIC -o driver.so driver.c
mkdir -p data/vulkan/icd.d vendors
manifest='{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}'
# shellcheck disable=SC2059
printf "$manifest" "$directory/driver.so" | tee data/vulkan/icd.d/driver.json >vendors/driver.json
export XDG_DATA_DIRS=$directory/data XDG_CONFIG_DIRS=/nonexistent

cat >ask.py <<'END'
import ctypes
import sys

library = ctypes.CDLL(sys.argv[1])
if "vulkan" in sys.argv[1]:
    library.vkEnumerateInstanceExtensionProperties(None, ctypes.byref(ctypes.c_uint()), None)
elif "EGL" in sys.argv[1]:
    library.eglQueryString(None, 0x3055)
else:
    library.clGetPlatformIDs(0, None, ctypes.byref(ctypes.c_uint()))
END
ask() { found=$(env "$@" 2>/dev/null); echo "${found:-no driver}"; }
searched() {
  strace -f -qq -e trace=openat -o trace env "$@"
  grep -q "$place" trace && echo "$place searched" || echo "not searched"
}
row() { printf '%-38s unset: %s; empty: %s\n' "$1:" "$2" "$3"; }
{
  vulkan=(python3 ask.py libvulkan.so.1) egl=(python3 ask.py libEGL.so.1) opencl=(python3 ask.py libOpenCL.so.1)
  row 'Vulkan, VK_DRIVER_FILES' "$(ask "${vulkan[@]}")" "$(ask VK_DRIVER_FILES= "${vulkan[@]}")"
  row 'Vulkan, VK_ADD_DRIVER_FILES' "$(ask "${vulkan[@]}")" "$(ask VK_ADD_DRIVER_FILES= "${vulkan[@]}")"
  export __EGL_VENDOR_LIBRARY_DIRS=$directory/vendors
  row 'EGL, __EGL_VENDOR_LIBRARY_FILENAMES' "$(ask "${egl[@]}")" "$(ask __EGL_VENDOR_LIBRARY_FILENAMES= "${egl[@]}")"
  unset __EGL_VENDOR_LIBRARY_DIRS
  place=/usr/share/glvnd
  row 'EGL, __EGL_VENDOR_LIBRARY_DIRS' "$(searched "${egl[@]}")" "$(searched __EGL_VENDOR_LIBRARY_DIRS= "${egl[@]}")"
  place=/etc/OpenCL
  row 'OpenCL, OCL_ICD_VENDORS' "$(searched "${opencl[@]}")" "$(searched OCL_ICD_VENDORS= "${opencl[@]}")"
} | tee seen
diff seen - <<'END'
Vulkan, VK_DRIVER_FILES:               unset: driver loaded; empty: no driver
Vulkan, VK_ADD_DRIVER_FILES:           unset: driver loaded; empty: driver loaded
EGL, __EGL_VENDOR_LIBRARY_FILENAMES:   unset: driver loaded; empty: no driver
EGL, __EGL_VENDOR_LIBRARY_DIRS:        unset: /usr/share/glvnd searched; empty: not searched
OpenCL, OCL_ICD_VENDORS:               unset: /etc/OpenCL searched; empty: /etc/OpenCL searched
END
