#!/bin/bash
# Packages:  cuda-bindings 12.9.10, cuda-pathfinder 1.9.1, nvidia-cuda-nvrtc-cu12 12.9.86, nvidia-cuda-nvrtc 13.5.37 (PyPI)
# Guess:     cuda-bindings 12.9, chosen because the driver knows no later CUDA, uses the libraries of CUDA 12. Wheels of
#            CUDA 13 beside them are for others.
# Behaviour: cuda-pathfinder finds the libraries for it and does not ask which version it is for: it takes CUDA 13's
#            folder first. So once another package brings nvidia-cuda-nvrtc along, NVRTC 13 compiles for the bindings
#            of 12.9, without a word, and its PTX has a version that a driver of CUDA 12 refuses. To remove the wheel
#            undoes it.
# Seen:
#   NVRTC of 12:          NVRTC 12.9, PTX 8.8
#   NVRTC of 12 and 13:   NVRTC 13.5, PTX 9.5
#   13 removed:           NVRTC 12.9, PTX 8.8
# Needs python3 with venv. It downloads 150 MB.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
pip() { venv/bin/pip --quiet --disable-pip-version-check "$@"; }
pip install cuda-bindings==12.9.10 cuda-pathfinder==1.9.1 nvidia-cuda-nvrtc-cu12==12.9.86

cat >compile.py <<'END'
import re

from cuda.bindings import nvrtc

_, major, minor = nvrtc.nvrtcVersion()
status, program = nvrtc.nvrtcCreateProgram(b"__global__ void empty() {}", b"empty.cu", 0, [], [])
(status,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_80"])
assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
nvrtc.nvrtcGetPTX(program, ptx)
print(f"NVRTC {major}.{minor}, PTX", re.search(rb"\.version ([0-9.]+)", ptx)[1].decode())
END
look() { printf '%-21s %s\n' "$1:" "$(venv/bin/python compile.py)"; }
{
  look 'NVRTC of 12'
  pip install nvidia-cuda-nvrtc==13.5.37
  look 'NVRTC of 12 and 13'
  pip uninstall --yes nvidia-cuda-nvrtc
  look '13 removed'
} | tee seen
diff seen - <<'END'
NVRTC of 12:          NVRTC 12.9, PTX 8.8
NVRTC of 12 and 13:   NVRTC 13.5, PTX 9.5
13 removed:           NVRTC 12.9, PTX 8.8
END
