#!/bin/bash
# Packages:  libnvidia-encode1, libnvcuvid1 and libcuda1 535.309.01-0+deb12u1 (Debian 12, non-free)
# Guess:     NVENC's library refuses to work where there is no GPU: what asks it for the version of its interface, as
#            encoders do first, learns at the same time whether there is an encoder.
# Behaviour: It answers with the newest version that it knows, and makes an instance with all functions, also without
#            a kernel module, without device nodes and even without libcuda.so.1. So the check passes in each
#            container that has the file, and only opening a session tells whether there is an encoder.
# Seen:
#   without libcuda: NvEncodeAPIGetMaxSupportedVersion 0 12.1, NvEncodeAPICreateInstance 0
#   with libcuda: NvEncodeAPIGetMaxSupportedVersion 0 12.1, NvEncodeAPICreateInstance 0
# Needs root, and a machine without NVIDIA's kernel module.
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
apt-get "${options[@]}" download {libnvidia-encode1,libnvcuvid1,libcuda1}=535.309.01-0+deb12u1
for package in *.deb; do dpkg -x "$package" root; done
mkdir without with
cp "$(find root -name libnvidia-encode.so.535.309.01)" without/libnvidia-encode.so.1
cp "$(find root -name libnvcuvid.so.535.309.01)" without/libnvcuvid.so.1
cp without/* with
cp "$(find root -name libcuda.so.535.309.01)" with/libcuda.so.1

cat >ask.py <<'END'
import ctypes

library = ctypes.CDLL("libnvidia-encode.so.1")
version = ctypes.c_uint32()
status = library.NvEncodeAPIGetMaxSupportedVersion(ctypes.byref(version))
major, minor = version.value >> 4, version.value & 15
# NV_ENCODE_API_FUNCTION_LIST, with room to spare: its version first, then functions.
functions = (ctypes.c_uint32 * 1024)(major | minor << 24 | 2 << 16 | 7 << 28)
created = library.NvEncodeAPICreateInstance(functions)
print(f"NvEncodeAPIGetMaxSupportedVersion {status} {major}.{minor}, NvEncodeAPICreateInstance {created}")
END
# A /dev without NVIDIA's nodes, which the library could make.
ask() { unshare --mount sh -c 'mount -t tmpfs tmpfs /dev && exec python3 ask.py'; }
for how in without with; do echo "$how libcuda: $(LD_LIBRARY_PATH=$PWD/$how ask)"; done | tee seen
diff seen - <<'END'
without libcuda: NvEncodeAPIGetMaxSupportedVersion 0 12.1, NvEncodeAPICreateInstance 0
with libcuda: NvEncodeAPIGetMaxSupportedVersion 0 12.1, NvEncodeAPICreateInstance 0
END
