#!/bin/bash
# Packages:  glances 4.5.8, gpustat 1.1.1, nvidia-ml-py 13.615.71 (PyPI)
# Guess:     If one of several GPUs is lost (NVML_ERROR_GPU_IS_LOST for its handle), a monitor shows the others, or says
#            that something is wrong.
# Behaviour: Glances shows no GPU at all, and so exports none, from its next start on: it asks for all handles at once
#            and takes any error for "no NVML", which it tells only its debug log. An alert on one GPU's metrics hears
#            nothing at all when it matters. gpustat shows the others, and the lost one as lost.
# Seen (a library with two GPUs, which refuses the second one's handle, stands for NVML):
#   both work, glances:   nvidia0 nvidia1
#   both work, gpustat:   GPU 0, GPU 1
#   one is lost, glances: none, status 0
#   one is lost, gpustat: GPU 0, ((GPU is lost))
# Needs gcc, and python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check glances==4.5.8 gpustat==1.1.1 nvidia-ml-py==13.615.71

cat >nvml.c <<'END'
#include <stdio.h>
#include <stdlib.h>
#define UNSUPPORTED(function) int function(void) { return 3; }
static int devices[2];
static int place(int *device) { return device - devices; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == 15 ? "GPU is lost" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return snprintf(to, size, "535.309.01") < 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **device) {
  *device = devices + index;
  return index && getenv("LOST") ? 15 : 0;
}
int nvmlDeviceGetIndex(int *device, unsigned *index) { *index = place(device); return 0; }
int nvmlDeviceGetName(int *device, char *to, unsigned size) { return snprintf(to, size, "GPU %d", place(device)) < 0; }
int nvmlDeviceGetUUID(int *device, char *to, unsigned size) { return snprintf(to, size, "GPU-%d", place(device)) < 0; }
int nvmlDeviceGetMemoryInfo(int *device, unsigned long long *memory) {
  memory[0] = 16ULL << 30, memory[1] = 12ULL << 30, memory[2] = 4ULL << 30;
  return 0;
}
UNSUPPORTED(nvmlDeviceGetTemperature)
UNSUPPORTED(nvmlDeviceGetUtilizationRates)
UNSUPPORTED(nvmlDeviceGetFanSpeed)
UNSUPPORTED(nvmlDeviceGetPowerUsage)
UNSUPPORTED(nvmlDeviceGetEnforcedPowerLimit)
UNSUPPORTED(nvmlDeviceGetEncoderUtilization)
UNSUPPORTED(nvmlDeviceGetDecoderUtilization)
UNSUPPORTED(nvmlDeviceGetComputeRunningProcesses_v3)
UNSUPPORTED(nvmlDeviceGetGraphicsRunningProcesses_v3)
END
gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c
export LD_LIBRARY_PATH=$PWD HOME=$PWD

glances() {
  status=0
  venv/bin/glances --stdout gpu --stop-after 2 >output 2>&1 || status=$?
  found=$(tail -n 1 output | grep -oE "'gpu_id': 'nvidia[0-9]" | grep -oE 'nvidia[0-9]' | paste -sd' ' || true)
  echo "${found:-none, status $status}"
}
gpustat() { venv/bin/gpustat --json 2>>log | sed -nE 's/.*"name": "(.*)",/\1/p' | paste -sd, | sed 's/,/, /'; }
{
  echo "both work, glances:   $(glances)"
  echo "both work, gpustat:   $(gpustat)"
  export LOST=1
  echo "one is lost, glances: $(glances)"
  echo "one is lost, gpustat: $(gpustat)"
} | tee seen
[ ! -s log ] || cat log >&2
diff seen - <<'END'
both work, glances:   nvidia0 nvidia1
both work, gpustat:   GPU 0, GPU 1
one is lost, glances: none, status 0
one is lost, gpustat: GPU 0, ((GPU is lost))
END
