#!/bin/bash
# Packages:  libvulkan1 1.3.239.0-1, libegl1 and libglvnd0 1.6.0-1 (Debian 12)
# Guess:     A driver's manifest in the first directory (/etc) hides one of the same name in a later directory
#            (/usr/share), as systemd's drop-ins and XDG's desktop files do. And the numbers in the names of EGL's
#            manifests (10_nvidia.json, 50_mesa.json) order them over all directories.
# Behaviour: Nothing hides anything: Vulkan's loader and libglvnd load both. So a driver cannot be replaced or disabled
#            by a file of its name in /etc. libglvnd sorts by name inside a directory only: 50 of the first directory
#            comes before 10 of the second.
# Seen:
#   Vulkan, driver.json in both:            first second
#   EGL, driver.json in both:               first second
#   EGL, 50_driver.json and 10_driver.json: first second
# Needs gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download libvulkan1=1.3.239.0-1 libegl1=1.6.0-1 libglvnd0=1.6.0-1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu HOME=/nonexistent

# A library that says when it is loaded stands for a driver.
cat >driver.c <<'END'
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void tell(void) { (void)!write(1, NAME, strlen(NAME)); }
END
for name in first second; do
  gcc -shared -fPIC -DNAME="\"$name \"" -o "$name.so" driver.c
  mkdir -p "$name/vulkan/icd.d" "egl-$name"
done
manifest() {
  printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}' "$directory/$1.so"
}
cat >ask.py <<'END'
import ctypes
import sys

library = ctypes.CDLL(sys.argv[1])
if "vulkan" in sys.argv[1]:
    library.vkEnumerateInstanceExtensionProperties(None, ctypes.byref(ctypes.c_uint()), None)
else:
    library.eglQueryString(None, 0x3055)
END
for name in first second; do
  manifest "$name" | tee "$name/vulkan/icd.d/driver.json" >"egl-$name/driver.json"
done
export XDG_CONFIG_DIRS=$directory/first XDG_DATA_DIRS=$directory/second
export __EGL_VENDOR_LIBRARY_DIRS=$directory/egl-first:$directory/egl-second
ask() { printf '%-39s %s\n' "$1:" "$(python3 ask.py "$2" 2>/dev/null | sed 's/ $//')"; }
{
  ask 'Vulkan, driver.json in both' libvulkan.so.1
  ask 'EGL, driver.json in both' libEGL.so.1
  mv egl-first/driver.json egl-first/50_driver.json
  mv egl-second/driver.json egl-second/10_driver.json
  ask 'EGL, 50_driver.json and 10_driver.json' libEGL.so.1
} | tee seen
diff seen - <<'END'
Vulkan, driver.json in both:            first second
EGL, driver.json in both:               first second
EGL, 50_driver.json and 10_driver.json: first second
END
