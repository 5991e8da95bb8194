#!/bin/bash
# Packages:  nvidia-cuda-nvcc-cu12 12.9.86, nvidia-cuda-runtime-cu12 12.9.79, nvidia-cuda-nvcc and nvidia-cuda-runtime
#            13.5.37 (PyPI)
# Guess:     nvidia-cuda-nvcc-cu12 has nvcc, whose package it is called, and with the headers and libraries of the
#            runtime's wheel a program in C can be linked with -lcudart, so that an image needs no CUDA toolkit to
#            build an extension.
# Behaviour: CUDA 12's wheel has ptxas and nothing else to execute; it is the assembler for compilers as Triton and
#            XLA. CUDA 13's has nvcc. The libraries of both have no name without a version, which the linker looks
#            for: it takes only -l:libcudart.so.12, or the static library.
# Seen:
#   CUDA 12, programs: ptxas
#   CUDA 12, -lcudart: cannot find -lcudart
#   CUDA 12, -l:libcudart.so.12: linked
#   CUDA 13, programs: __nvcc_device_query bin2c cudafe++ fatbinary nvcc nvlink ptxas
#   CUDA 13, -lcudart: cannot find -lcudart
#   CUDA 13, -l:libcudart.so.13: linked
# Needs gcc, and python3 with venv. It downloads 90 MB.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv 12
python3 -m venv 13
pip=(bin/pip install -q --disable-pip-version-check --no-deps --no-cache-dir)
12/"${pip[@]}" nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79
13/"${pip[@]}" nvidia-cuda-nvcc==13.5.37 nvidia-cuda-runtime==13.5.37

cat >program.c <<'END'
int cudaRuntimeGetVersion(int *);
int main(void) { int version; return cudaRuntimeGetVersion(&version); }
END
for major in 12 13; do
  programs=$(find "$major"/lib/*/site-packages/nvidia -path '*/bin/*' -type f -perm -100 -printf '%f\n' | LC_ALL=C sort)
  echo "CUDA $major, programs:" $programs
  library=$(find "$major"/lib/*/site-packages/nvidia -name "libcudart.so.$major" -printf '%h\n' -quit)
  for option in -lcudart "-l:libcudart.so.$major"; do
    if gcc -o program program.c -L"$library" "$option" 2>errors; then
      echo "CUDA $major, $option: linked"
    else
      echo "CUDA $major, $option: $(grep -o 'cannot find -lcudart' errors)"
    fi
  done
done | tee seen
diff seen - <<'END'
CUDA 12, programs: ptxas
CUDA 12, -lcudart: cannot find -lcudart
CUDA 12, -l:libcudart.so.12: linked
CUDA 13, programs: __nvcc_device_query bin2c cudafe++ fatbinary nvcc nvlink ptxas
CUDA 13, -lcudart: cannot find -lcudart
CUDA 13, -l:libcudart.so.13: linked
END
