#!/bin/bash
# Packages:  nvidia-nccl-cu11 2.21.5, nvidia-nccl-cu13 2.32.3 (PyPI)
# Guess:     NCCL_IB_DISABLE=true, as switches are often written in a pod's environment, does what 1 does; or else NCCL
#            warns.
# Behaviour: Only a number counts. NCCL 2.21 reads a word as 0, so that "true" turns off what is on by default. 2.32
#            takes the default. Neither says so with NCCL_DEBUG=WARN; with INFO 2.21 says that the environment has
#            set it to 0. A few settings of 2.32, as NCCL_SET_THREAD_NAME, do understand "true", but not "yes".
# Seen:
#   2.21.5, NCCL_IB_DISABLE: 1 is 1, true is 0, yes is 0
#   2.21.5, NCCL_DMABUF_ENABLE: unset is 1, true is 0
#   2.21.5, WARN: nothing
#   2.21.5, INFO: "NCCL_IB_DISABLE set by environment to 0."
#   2.32.3, NCCL_IB_DISABLE: 1 is 1, true is 0, yes is 0
#   2.32.3, NCCL_DMABUF_ENABLE: unset is 1, true is 1
#   2.32.3, WARN: nothing
#   2.32.3, INFO: "Invalid value true for NCCL_IB_DISABLE, using default 0."
#   2.32.3, NCCL_SET_THREAD_NAME=1: TRUE
#   2.32.3, NCCL_SET_THREAD_NAME=true: TRUE
#   2.32.3, NCCL_SET_THREAD_NAME=yes: FALSE
# Needs binutils and python3 with venv. It downloads 450 MB.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

for wheel in nvidia-nccl-cu11==2.21.5 nvidia-nccl-cu13==2.32.3; do
  python3 -m venv "${wheel#*==}"
  "${wheel#*==}"/bin/pip install -q --disable-pip-version-check --no-deps --no-cache-dir "$wheel"
  ln -s "$(echo "${wheel#*==}"/lib/python3.*/site-packages/nvidia/nccl/lib/libnccl.so.2)" "${wheel#*==}.so"
done

# Each setting has a function that reads it. It is not exported, but the symbol table has it.
cat >read.py <<'END'
import ctypes
import subprocess
import sys

path, function = sys.argv[1:]
library = ctypes.CDLL(path)
lines = subprocess.run(["nm", path], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
places = {line.split()[2]: int(line.split()[0], 16) for line in lines if line[0] != " "}
start = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value - places["ncclGetVersion"]
print("", ctypes.CFUNCTYPE(ctypes.c_int64)(start + places[function])(), sep="\n")
END
# The newest settings have a public function instead.
cat >ask.py <<'END'
import ctypes
import sys

path, name = sys.argv[1:]
text, size = ctypes.c_char_p(), ctypes.c_int()
assert ctypes.CDLL(path).ncclParamGetParameter(name.encode(), ctypes.byref(text), ctypes.byref(size)) == 0
print(text.value.decode())
END
value() { env "${@:3}" python3 read.py "$PWD/$1.so" "$2" | tail -n 1; }
words() {
  found=$(env NCCL_DEBUG="$2" NCCL_IB_DISABLE=true python3 read.py "$PWD/$1.so" _Z18ncclParamIbDisablev |
    sed -nE 's/.*NCCL (WARN|ATTN|INFO) (.*NCCL_IB_DISABLE.*)/"\2"/p')
  echo "${found:-nothing}"
}
for version in 2.21.5 2.32.3; do
  ib=_Z18ncclParamIbDisablev buffer=_Z21ncclParamDmaBufEnablev
  echo "$version, NCCL_IB_DISABLE:" "1 is $(value $version $ib NCCL_IB_DISABLE=1)," \
    "true is $(value $version $ib NCCL_IB_DISABLE=true), yes is $(value $version $ib NCCL_IB_DISABLE=yes)"
  echo "$version, NCCL_DMABUF_ENABLE:" "unset is $(value $version $buffer -u NCCL_DMABUF_ENABLE)," \
    "true is $(value $version $buffer NCCL_DMABUF_ENABLE=true)"
  for level in WARN INFO; do echo "$version, $level: $(words $version $level)"; done
done >seen
name=NCCL_SET_THREAD_NAME
for value in 1 true yes; do
  echo "2.32.3, $name=$value: $(env $name=$value python3 ask.py "$PWD/2.32.3.so" $name)"
done >>seen
cat seen
diff seen - <<'END'
2.21.5, NCCL_IB_DISABLE: 1 is 1, true is 0, yes is 0
2.21.5, NCCL_DMABUF_ENABLE: unset is 1, true is 0
2.21.5, WARN: nothing
2.21.5, INFO: "NCCL_IB_DISABLE set by environment to 0."
2.32.3, NCCL_IB_DISABLE: 1 is 1, true is 0, yes is 0
2.32.3, NCCL_DMABUF_ENABLE: unset is 1, true is 1
2.32.3, WARN: nothing
2.32.3, INFO: "Invalid value true for NCCL_IB_DISABLE, using default 0."
2.32.3, NCCL_SET_THREAD_NAME=1: TRUE
2.32.3, NCCL_SET_THREAD_NAME=true: TRUE
2.32.3, NCCL_SET_THREAD_NAME=yes: FALSE
END
