#!/bin/bash
# Package:   triton 3.9.0 (PyPI)
# Guess:     Triton looks for libcuda.so.1 where the dynamic loader does: in LD_LIBRARY_PATH, by which some clusters
#            give a container its driver, and then by /etc/ld.so.cache.
# Behaviour: It asks the cache first, and LD_LIBRARY_PATH only if the cache has no such name. A cache that names a
#            libcuda which is gone, as in an image that was made of a container with a GPU, ends in "libcuda.so cannot
#            found!", though the process has loaded libcuda. If it is there, as CUDA's compat library, Triton links with
#            that one, and the process loads the other. TRITON_LIBCUDA_PATH helps.
# Seen (LD_LIBRARY_PATH is /driver in each case):
#   cache without libcuda:      loader /driver, Triton /driver
#   cache with /gone:           loader /driver, Triton AssertionError
#   cache with /compat:         loader /driver, Triton /compat
#   the same, with its option:  loader /driver, Triton /driver
# Needs root, gcc, and python3 with venv. It downloads 290 MB.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-deps --no-cache-dir triton==3.9.0

mkdir driver gone compat
echo 'int cuInit(void) { return 0; }' >cuda.c
for name in driver gone compat; do
  gcc -shared -fPIC -nostdlib -Wl,-soname,libcuda.so.1 -o $name/libcuda.so.1 cuda.c
  echo "$PWD/$name" >configuration
  /sbin/ldconfig -X -C cache-$name -f configuration
done
: >configuration
/sbin/ldconfig -X -C cache-none -f configuration
rm gone/libcuda.so.1
cat >ask.py <<'END'
import ctypes
import os

ctypes.CDLL("libcuda.so.1")
with open("/proc/self/maps", encoding="utf-8") as maps:
    loaded = next(line.split()[-1] for line in maps if "libcuda.so.1" in line)
from triton.backends.nvidia.driver import libcuda_dirs

try:
    found = " ".join("/" + os.path.basename(each) for each in libcuda_dirs())
except AssertionError as error:
    found = type(error).__name__
print(f"loader /{os.path.basename(os.path.dirname(loaded))}, Triton {found}")
END
# ask TITLE CACHE [VARIABLE...]: in a mount namespace, where the cache is the system's
ask() {
  printf '%-27s %s\n' "$1:" "$(env LD_LIBRARY_PATH="$PWD/driver" "${@:3}" unshare --mount \
    sh -c 'mount --bind "$1" /etc/ld.so.cache && exec venv/bin/python ask.py' sh "cache-$2")"
}
{
  ask 'cache without libcuda' none
  ask 'cache with /gone' gone
  ask 'cache with /compat' compat
  ask 'the same, with its option' compat TRITON_LIBCUDA_PATH="$PWD/driver"
} | tee seen
diff seen - <<'END'
cache without libcuda:      loader /driver, Triton /driver
cache with /gone:           loader /driver, Triton AssertionError
cache with /compat:         loader /driver, Triton /compat
the same, with its option:  loader /driver, Triton /driver
END
