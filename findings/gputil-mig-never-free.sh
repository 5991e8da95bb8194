#!/bin/bash
# Packages:  GPUtil 1.4.0, nvsmi 0.4.2 (PyPI)
# Guess:     A GPU in MIG mode, for which nvidia-smi has no utilization ("[N/A]"), counts as idle, or is an error, for
#            libraries that choose a free GPU by what nvidia-smi says.
# Behaviour: Both read it as NaN, which is below no limit: the GPU is never free, however idle it is. GPUtil says that
#            it could not find one, and nvsmi gives an empty list, as on a node whose GPUs are all in use; nvsmi does
#            so with the default limit, 100%, too. GPUtil's includeNan=True helps.
# Seen (nvidia-smi's answer for an idle GPU in MIG mode):
#   GPUtil, the GPU: load nan, memory 0%
#   GPUtil, getAvailable(): []
#   GPUtil, getAvailable(includeNan=True): [0]
#   GPUtil, getFirstAvailable(): Could not find an available GPU
#   nvsmi, the GPU: load nan, memory 0%
#   nvsmi, get_available_gpus(): []
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
# GPUtil needs distutils, which later versions of Python lack and setuptools has.
venv/bin/pip install -q --disable-pip-version-check GPUtil==1.4.0 nvsmi==0.4.2 setuptools==80.9.0

# It stands for nvidia-smi: the fields of --query-gpu, in their order.
mkdir bin
cat >bin/nvidia-smi <<'END'
#!/usr/bin/env python3
import sys

KNOWN = {
    "index": "0", "uuid": "GPU-00000000-0000-0000-0000-000000000001", "utilization.gpu": "[N/A]",
    "memory.total": "81559", "memory.used": "2", "memory.free": "81079", "driver_version": "580.95.05",
    "name": "NVIDIA H100 80GB HBM3", "gpu_serial": "0000000000000", "display_active": "Disabled",
    "display_mode": "Disabled", "temperature.gpu": "30",
}
for argument in sys.argv[1:]:
    if argument.startswith("--query-gpu="):
        print(", ".join(KNOWN[name] for name in argument.split("=")[1].split(",")))
END
chmod 755 bin/nvidia-smi

cat >ask.py <<'END'
import GPUtil
import nvsmi

for gpu in GPUtil.getGPUs():
    print(f"GPUtil, the GPU: load {gpu.load}, memory {gpu.memoryUtil:.0%}")
print("GPUtil, getAvailable():", GPUtil.getAvailable())
print("GPUtil, getAvailable(includeNan=True):", GPUtil.getAvailable(includeNan=True))
try:
    print("GPUtil, getFirstAvailable():", GPUtil.getFirstAvailable())
except RuntimeError as error:
    print("GPUtil, getFirstAvailable():", str(error).split(" after ")[0])
for gpu in nvsmi.get_gpus():
    print(f"nvsmi, the GPU: load {gpu.gpu_util}, memory {gpu.mem_util:.0f}%")
print("nvsmi, get_available_gpus():", list(nvsmi.get_available_gpus()))
END
PATH=$PWD/bin:$PATH venv/bin/python -W ignore ask.py | tee seen
diff seen - <<'END'
GPUtil, the GPU: load nan, memory 0%
GPUtil, getAvailable(): []
GPUtil, getAvailable(includeNan=True): [0]
GPUtil, getFirstAvailable(): Could not find an available GPU
nvsmi, the GPU: load nan, memory 0%
nvsmi, get_available_gpus(): []
END
