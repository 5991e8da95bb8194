#!/bin/bash
# Packages:  ray 2.60.0 (PyPI), condor 23.9.6+dfsg-2.1+b10 (Debian 13)
# Guess:     A scheduler reads CUDA_VISIBLE_DEVICES as CUDA documents it: empty is no GPU, and an index that does not
#            exist, as -1, hides itself and all behind it. So a process has as many GPUs for the scheduler as for CUDA.
# Behaviour: Ray counts the entries unless the value is empty: with -1, none or void, by which containers hide all GPUs,
#            it offers one GPU. HTCondor reads those right, but takes an empty value as unset and announces each GPU, and
#            it counts the GPUs behind a -1.
# Seen (GPUs of two, Ray's by an NVML of two GPUs, HTCondor's simulated by itself; CUDA has 2, 0, 0, 0 and 1):
#   CUDA_VISIBLE_DEVICES    Ray  HTCondor
#   unset                     2         2
#   empty                     0         2
#   -1                        1         0
#   void                      1         0
#   0,-1,1                    2         2
# Needs gcc, and python3 with pip.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download condor=23.9.6+dfsg-2.1+b10 libc6 libstdc++6 libgcc-s1
for package in *.deb; do dpkg -x "$package" root; done
python3 -m pip install -q --disable-pip-version-check --no-compile --target packages ray==2.60.0

cat >nvml.c <<'END'
#include <stdio.h>
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 2, 0; }
int nvmlDeviceGetCount(unsigned *count) { return *count = 2, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, long *device) { return index > 1 ? 2 : (*device = index + 1, 0); }
int nvmlDeviceGetHandleByIndex(unsigned index, long *device) { return index > 1 ? 2 : (*device = index + 1, 0); }
int nvmlDeviceGetIndex(long device, unsigned *index) { return *index = device - 1, 0; }
int nvmlDeviceGetName(long device, char *text, unsigned size) { return strcpy(text, "NVIDIA A100-SXM4-40GB"), 0; }
int nvmlDeviceGetUUID(long device, char *text, unsigned size) {
  return snprintf(text, size, "GPU-%ld0000000-0000-0000-0000-000000000000", device), 0;
}
const char *nvmlErrorString(int status) { return "error"; }
END
mkdir driver
gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o driver/libnvidia-ml.so.1 nvml.c
cat >ask.py <<'END'
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

print(ResourceAndLabelSpec().resolve(is_head=True).num_gpus)
END
condor() {
  root/usr/lib64/ld-linux-x86-64.so.2 --library-path root/usr/lib/x86_64-linux-gnu \
    root/usr/libexec/condor/condor_gpu_discovery -simulate:4,2 | { grep -o 'GPU-[0-9a-f]*' || true; } | wc -l
}
ray() { PYTHONPATH=$PWD/packages LD_LIBRARY_PATH=$PWD/driver python3 ask.py 2>/dev/null | tail -1; }
export CONDOR_CONFIG=ONLY_ENV
# show TITLE: with the variable as it is
show() { printf '%-22s %4s %9s\n' "$1" "$(ray)" "$(condor)"; }
{
  printf '%-22s %4s %9s\n' CUDA_VISIBLE_DEVICES Ray HTCondor
  unset CUDA_VISIBLE_DEVICES
  show unset
  export CUDA_VISIBLE_DEVICES=
  show empty
  for CUDA_VISIBLE_DEVICES in -1 void 0,-1,1; do show "$CUDA_VISIBLE_DEVICES"; done
} | tee seen
diff seen - <<'END'
CUDA_VISIBLE_DEVICES    Ray  HTCondor
unset                     2         2
empty                     0         2
-1                        1         0
void                      1         0
0,-1,1                    2         2
END
