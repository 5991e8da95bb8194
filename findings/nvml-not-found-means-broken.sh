#!/bin/bash
# Packages:  nvidia-ml-py 13.615.71, gpustat 1.1.1, nvitop 1.7.2 (PyPI)
# Guess:     NVMLError_LibraryNotFound, "NVML Shared Library Not Found", of NVIDIA's Python library means that
#            libnvidia-ml.so.1 is not there; if it is there and broken, the error is another one or tells why.
# Behaviour: Every failure to load has this error: an empty file, as an image has it that was committed from a container
#            with a GPU, a folder, as "docker run -v" makes it, and a library that needs another which is not there.
#            The loader's reason is in the exception's __context__ only, so in a traceback and not in the message, and
#            monitors print the message: then people install a driver again that is there.
# Seen:
#   no file:          NVML Shared Library Not Found; in the context: No such file or directory
#   an empty file:    NVML Shared Library Not Found; in the context: file too short
#   a folder:         NVML Shared Library Not Found; in the context: Is a directory
#   needs another:    NVML Shared Library Not Found; in the context: No such file or directory
#   gpustat, an empty file: NVML Shared Library Not Found
#   nvitop, an empty file: FATAL ERROR: NVIDIA Management Library (NVML) not found.
# Needs gcc, python3 with venv, and a machine without NVIDIA's driver.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check nvidia-ml-py==13.615.71 gpustat==1.1.1 nvitop==1.7.2

mkdir none empty folder needs folder/libnvidia-ml.so.1
: >empty/libnvidia-ml.so.1
echo 'int other;' >other.c
echo 'extern int other; int nvmlInit_v2(void) { return other; }' >nvml.c
gcc -shared -fPIC -Wl,-soname,libother.so.1 -o libother.so other.c
gcc -shared -fPIC -o needs/libnvidia-ml.so.1 nvml.c libother.so

cat >ask.py <<'END'
import pynvml

try:
    pynvml.nvmlInit()
except pynvml.NVMLError as error:
    print(f"{error}; in the context: {str(error.__context__).split(': ')[-1]}")
END
ask() { printf '%-17s %s\n' "$1:" "$(LD_LIBRARY_PATH=$PWD/$2 venv/bin/python ask.py)"; }
monitor() { LD_LIBRARY_PATH=$PWD/empty "venv/bin/$@" 2>&1 || true; }
{
  ask "no file" none
  ask "an empty file" empty
  ask "a folder" folder
  ask "needs another" needs
  echo "gpustat, an empty file: $(monitor gpustat | grep NVML)"
  echo "nvitop, an empty file: $(monitor nvitop --once | grep ERROR)"
} | tee seen
diff seen - <<'END'
no file:          NVML Shared Library Not Found; in the context: No such file or directory
an empty file:    NVML Shared Library Not Found; in the context: file too short
a folder:         NVML Shared Library Not Found; in the context: Is a directory
needs another:    NVML Shared Library Not Found; in the context: No such file or directory
gpustat, an empty file: NVML Shared Library Not Found
nvitop, an empty file: FATAL ERROR: NVIDIA Management Library (NVML) not found.
END
