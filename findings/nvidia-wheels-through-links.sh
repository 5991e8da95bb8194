#!/bin/bash
# Packages:  nvidia-cuda-nvrtc, nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-runtime 13.5.37 (PyPI)
# Guess:     A link in /usr/local/lib or in a venv's bin to a file of a CUDA wheel does as well as the file: nvcc and
#            NVRTC find their other parts beside the real file.
# Behaviour: They look beside the name by which they were opened: $ORIGIN is the link's folder, and nvcc does the
#            like. NVRTC loads and says its version through a link, and then cannot compile anything for want of
#            its builtins; nvcc finds no headers. A link to the whole folder works. No GPU or driver is needed to
#            see it, but a check that only loads the library does not.
# Seen:
#   NVRTC, the file:             version 13.5, PTX
#   NVRTC, a link to it:         version 13.5, NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
#   NVRTC, a link to its folder: version 13.5, PTX
#   nvcc, the file:              PTX
#   nvcc, a link to it:          cuda_runtime.h: No such file or directory
#   nvcc, a link to its folder:  PTX
# Needs g++ and python3 with venv. It downloads 180 MB.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-deps nvidia-cuda-nvrtc==13.5.37 nvidia-cuda-nvcc==13.5.37 \
  nvidia-cuda-crt==13.5.37 nvidia-nvvm==13.5.37 nvidia-cuda-runtime==13.5.37
toolkit=$(echo "$PWD"/venv/lib/python3.*/site-packages/nvidia/cu13)
mkdir links
ln -s "$toolkit"/lib/libnvrtc.so.13 "$toolkit"/bin/nvcc links
ln -s "$toolkit" links/toolkit

cat >compile.py <<'END'
import ctypes
import sys

library = ctypes.CDLL(sys.argv[1])
library.nvrtcGetErrorString.restype = ctypes.c_char_p
major, minor, program, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
assert library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
source = b"__global__ void add(float *x) { x[threadIdx.x] += 1; }"
assert library.nvrtcCreateProgram(ctypes.byref(program), source, b"add.cu", 0, None, None) == 0
status = library.nvrtcCompileProgram(program, 0, None)
assert status or library.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0 and size.value > 100
print(f"version {major.value}.{minor.value}, {library.nvrtcGetErrorString(status).decode() if status else 'PTX'}")
END
echo '__global__ void add(float *x) { x[threadIdx.x] += 1; }' >add.cu

nvrtc() { printf '%-28s %s\n' "NVRTC, $1:" "$(python3 compile.py "$2")"; }
nvcc() {
  rm -f add.ptx
  LC_ALL=C "$2" -ptx add.cu 2>stderr || true
  [ -s add.ptx ] && found=PTX || found=$(sed -n 's/.*fatal error: //p' stderr)
  printf '%-28s %s\n' "nvcc, $1:" "$found"
}
{
  nvrtc 'the file' "$toolkit/lib/libnvrtc.so.13"
  nvrtc 'a link to it' "$PWD/links/libnvrtc.so.13"
  nvrtc 'a link to its folder' "$PWD/links/toolkit/lib/libnvrtc.so.13"
  nvcc 'the file' "$toolkit/bin/nvcc"
  nvcc 'a link to it' "$PWD/links/nvcc"
  nvcc 'a link to its folder' "$PWD/links/toolkit/bin/nvcc"
} | tee seen
diff seen - <<'END'
NVRTC, the file:             version 13.5, PTX
NVRTC, a link to it:         version 13.5, NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
NVRTC, a link to its folder: version 13.5, PTX
nvcc, the file:              PTX
nvcc, a link to it:          cuda_runtime.h: No such file or directory
nvcc, a link to its folder:  PTX
END
