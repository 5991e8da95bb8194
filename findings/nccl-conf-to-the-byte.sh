#!/bin/bash
# Package:   nvidia-nccl-cu13 2.32.3 (PyPI)
# Guess:     A line of /etc/nccl.conf, or of the file that NCCL_CONF_FILE names, may have spaces around "=", quotes,
#            or a comment behind the value, as in systemd's environment files or in a shell; or NCCL says that it does
#            not understand the line.
# Behaviour: The line is taken to the byte, but for a carriage return at its end. A space before "=" or at the
#            beginning, or "export", makes it another variable, so it is ignored. Quotes, a comment behind the value,
#            and spaces around it belong to the value: a number is invalid then and counts for nothing, and the
#            interface "eth0" of NCCL_SOCKET_IFNAME="eth0" does not exist. There is no error for the line.
# Seen (NAME is NCCL_SET_THREAD_NAME, which is FALSE by default):
#   NAME=1:                   TRUE
#   NAME=1, carriage return:  TRUE
#   NAME = 1:                 FALSE
#   space NAME=1:             FALSE
#   export NAME=1:            FALSE
#   NAME= 1:                  FALSE
#   NAME=1 space:             FALSE
#   NAME="1":                 FALSE
#   NAME=1 # comment:         FALSE
# Needs python3 with venv. It downloads 300 MB.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-deps --no-cache-dir nvidia-nccl-cu13==2.32.3

cat >read.py <<'END'
import ctypes
import glob

library = ctypes.CDLL(glob.glob("venv/lib/*/site-packages/nvidia/nccl/lib/libnccl.so.2")[0])
text, size = ctypes.c_char_p(), ctypes.c_int()
assert library.ncclParamGetParameter(b"NCCL_SET_THREAD_NAME", ctypes.byref(text), ctypes.byref(size)) == 0
print(text.value.decode())
END
export NCCL_CONF_FILE=$PWD/nccl.conf
ask() {
  # shellcheck disable=SC2059
  printf "$2" >nccl.conf
  printf '%-25s %s\n' "$1:" "$(python3 read.py)"
}
name=NCCL_SET_THREAD_NAME
{
  ask 'NAME=1' "$name=1\n"
  ask 'NAME=1, carriage return' "$name=1\r\n"
  ask 'NAME = 1' "$name = 1\n"
  ask 'space NAME=1' " $name=1\n"
  ask 'export NAME=1' "export $name=1\n"
  ask 'NAME= 1' "$name= 1\n"
  ask 'NAME=1 space' "$name=1 \n"
  ask 'NAME="1"' "$name=\"1\"\n"
  ask 'NAME=1 # comment' "$name=1 # comment\n"
} | tee seen
diff seen - <<'END'
NAME=1:                   TRUE
NAME=1, carriage return:  TRUE
NAME = 1:                 FALSE
space NAME=1:             FALSE
export NAME=1:            FALSE
NAME= 1:                  FALSE
NAME=1 space:             FALSE
NAME="1":                 FALSE
NAME=1 # comment:         FALSE
END
