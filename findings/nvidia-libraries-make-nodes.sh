#!/bin/bash
# Packages:  libnvidia-ml1, libcuda1 535.309.01-0+deb12u1 (Debian 12, non-free)
# Guess:     Whether a machine has NVIDIA's driver can be told by /dev/nvidiactl. To ask NVML or CUDA changes nothing.
# Behaviour: Both libraries create the node if it is missing and the caller may, with the usual number, even if no kernel
#            module is loaded and no GPU is there. So it exists wherever root has once asked, on the node or, with
#            CAP_MKNOD, in a container. Only opening it tells whether there is a driver (ENXIO).
# Seen:
#   before: nothing
#   nvmlInit_v2: 9, then /dev/nvidiactl 195:255 666
#   cuInit: 100, then /dev/nvidiactl 195:255 666
# Needs root, and a machine without NVIDIA's kernel module and nvidia-modprobe.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with the lists of this machine's archive and its non-free part, in this directory only.
mkdir -p sources lists/partial archives/partial
for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
  [ ! -f "$source" ] || sed -E "s/^(Components:|deb .* bookworm[^ ]*) main.*/\1 main non-free/" \
    "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download libnvidia-ml1=535.309.01-0+deb12u1 libcuda1=535.309.01-0+deb12u1
for package in *.deb; do dpkg -x "$package" root; done
cat >ask.py <<'END'
import ctypes
import os
import sys


def nodes():
    found = [name for name in sorted(os.listdir("/dev")) if name.startswith("nvidia")]
    for name in found:
        status = os.stat(f"/dev/{name}")
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        yield f"/dev/{name} {number} {status.st_mode & 0o777:o}"


print("before:", ", ".join(nodes()) or "nothing")
for path, function, words in zip(sys.argv[1:], ("nvmlInit_v2", "cuInit"), ((), (0,))):
    print(f"{function}: {getattr(ctypes.CDLL(path), function)(*words)}, then", ", ".join(nodes()) or "nothing")
    for name in [name for name in os.listdir("/dev") if name.startswith("nvidia")]:
        os.unlink(f"/dev/{name}")
END
# In a mount namespace with its own /dev.
unshare --mount sh -c 'mount -t tmpfs none /dev && exec "$@"' sh /usr/bin/python3 ask.py \
  "$(find "$PWD/root" -name 'libnvidia-ml.so.535*')" "$(find "$PWD/root" -name 'libcuda.so.535*')" | tee seen
diff seen - <<'END'
before: nothing
nvmlInit_v2: 9, then /dev/nvidiactl 195:255 666
cuInit: 100, then /dev/nvidiactl 195:255 666
END
