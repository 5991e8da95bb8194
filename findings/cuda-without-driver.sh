#!/bin/bash
# Packages:  nvidia-cuda-runtime 13.5.37, nvidia-cuda-runtime-cu12 12.9.79, cuda-bindings 13.5.0 (PyPI), libcuda1
#            535.309.01-0+deb12u1 (Debian 12, non-free)
# Guess:     In a container without a driver the CUDA runtime says that there is no driver, or no device. With
#            cuda-bindings, whose functions return a status as C's do, cuInit returns one as well.
# Behaviour: The runtime says 35, "driver version is insufficient", and gives 0 as the driver's version with success. It
#            says the same, and never "no device", if the driver is older than its major version. cuda-bindings' driver
#            functions raise without libcuda, even the one that explains a status, while its runtime functions return
#            35. So "update the driver" is the wrong reading of 35 in a container: often libcuda is not there.
# Seen:
#   no libcuda:
#     runtime 13, cudaGetDeviceCount: 35, CUDA driver version is insufficient for CUDA runtime version
#     runtime 13, cudaDriverGetVersion: 0, 0
#     runtime 12, cudaGetDeviceCount: 35, CUDA driver version is insufficient for CUDA runtime version
#     runtime 12, cudaDriverGetVersion: 0, 0
#     cuda-bindings, cuInit: raises DynamicLibNotFoundError
#     cuda-bindings, cuGetErrorString: raises DynamicLibNotFoundError
#     cuda-bindings, cudaGetDeviceCount: cudaErrorInsufficientDriver None
#   libcuda of CUDA 12.2, no GPU:
#     runtime 13, cudaGetDeviceCount: 35, CUDA driver version is insufficient for CUDA runtime version
#     runtime 13, cudaDriverGetVersion: 0, 12020
#     runtime 12, cudaGetDeviceCount: 100, no CUDA-capable device is detected
#     runtime 12, cudaDriverGetVersion: 0, 12020
#     cuda-bindings, cuInit: CUDA_ERROR_NO_DEVICE
#     cuda-bindings, cuGetErrorString: CUDA_SUCCESS b'no CUDA-capable device is detected'
#     cuda-bindings, cudaGetDeviceCount: cudaErrorInsufficientDriver None
# Needs root, python3 with venv, and a machine without NVIDIA's driver.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with the lists of this machine's archive and its non-free parts, in this directory only.
mkdir -p sources lists/partial archives/partial
for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
  [ ! -f "$source" ] || sed -E "s/^(Components:|deb .* bookworm[^ ]*) main.*/\1 main contrib non-free/" \
    "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download libcuda1=535.309.01-0+deb12u1
dpkg -x libcuda1_*.deb root
mkdir none driver
cp "$(find root -name libcuda.so.535.309.01)" driver/libcuda.so.1
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check cuda-bindings==13.5.0 nvidia-cuda-runtime==13.5.37 \
  nvidia-cuda-runtime-cu12==12.9.79

cat >ask.py <<'END'
import ctypes
import glob
import sys

from cuda.bindings import driver, runtime

print({"none": "no libcuda:", "driver": "libcuda of CUDA 12.2, no GPU:"}[sys.argv[1]])
for version in ("13", "12"):
    library = ctypes.CDLL(glob.glob(f"venv/lib/python3*/site-packages/nvidia/*/lib/libcudart.so.{version}")[0])
    library.cudaGetErrorString.restype = ctypes.c_char_p
    number = ctypes.c_int(-1)
    status = library.cudaGetDeviceCount(ctypes.byref(number))
    print(f"  runtime {version}, cudaGetDeviceCount: {status}, {library.cudaGetErrorString(status).decode()}")
    status = library.cudaDriverGetVersion(ctypes.byref(number))
    print(f"  runtime {version}, cudaDriverGetVersion: {status}, {number.value}")


def ask(name, function, *words):
    try:
        result = " ".join(str(getattr(each, "name", each)) for each in function(*words))
    except Exception as error:
        result = f"raises {type(error).__name__}"
    print(f"  cuda-bindings, {name}: {result}")


ask("cuInit", driver.cuInit, 0)
ask("cuGetErrorString", driver.cuGetErrorString, driver.CUresult(100))
ask("cudaGetDeviceCount", runtime.cudaGetDeviceCount)
END
{
  for libraries in none driver; do
    # In a mount namespace with its own /dev, where libcuda can make its node.
    LD_LIBRARY_PATH=$PWD/$libraries unshare --mount sh -c 'mount -t tmpfs none /dev && exec "$@"' sh \
      venv/bin/python ask.py $libraries
  done
} | tee seen
diff seen - <<'END'
no libcuda:
  runtime 13, cudaGetDeviceCount: 35, CUDA driver version is insufficient for CUDA runtime version
  runtime 13, cudaDriverGetVersion: 0, 0
  runtime 12, cudaGetDeviceCount: 35, CUDA driver version is insufficient for CUDA runtime version
  runtime 12, cudaDriverGetVersion: 0, 0
  cuda-bindings, cuInit: raises DynamicLibNotFoundError
  cuda-bindings, cuGetErrorString: raises DynamicLibNotFoundError
  cuda-bindings, cudaGetDeviceCount: cudaErrorInsufficientDriver None
libcuda of CUDA 12.2, no GPU:
  runtime 13, cudaGetDeviceCount: 35, CUDA driver version is insufficient for CUDA runtime version
  runtime 13, cudaDriverGetVersion: 0, 12020
  runtime 12, cudaGetDeviceCount: 100, no CUDA-capable device is detected
  runtime 12, cudaDriverGetVersion: 0, 12020
  cuda-bindings, cuInit: CUDA_ERROR_NO_DEVICE
  cuda-bindings, cuGetErrorString: CUDA_SUCCESS b'no CUDA-capable device is detected'
  cuda-bindings, cudaGetDeviceCount: cudaErrorInsufficientDriver None
END
