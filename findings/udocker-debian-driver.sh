#!/bin/bash
# Packages:  udocker 1.3.17 (PyPI), libcuda1 and nvidia-smi 535.309.01-0+deb12u1 (Debian 12, non-free)
# Guess:     "udocker setup --nvidia" copies the host's driver into a container, or fails.
# Behaviour: It copies a link as a link. With Debian's driver each library in /usr/lib/x86_64-linux-gnu, and nvidia-smi,
#            is a link to /etc/alternatives, which the container does not have. So there is no file of the driver in the
#            container, and udocker says "nvidia mode set" and exits with 0. Whatever looks for a driver in the usual
#            directories of a Debian host has to follow two links.
# Seen:
#   setup: status 0, nvidia mode set
#   libcuda.so.1 -> /etc/alternatives/nvidia--libcuda.so.1-x86_64-linux-gnu, dangling
#   libnvidia-ml.so.1 -> /etc/alternatives/nvidia--libnvidia-ml.so.1-x86_64-linux-gnu, dangling
#   nvidia-smi -> /etc/alternatives/nvidia--nvidia-smi, dangling
#   on the host: libcuda.so.1 is /usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.309.01
# Needs root, overlayfs, and python3 with venv.
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
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check udocker==1.3.17
mkdir -p image/{bin,etc,usr/bin,usr/lib/x86_64-linux-gnu} layers
touch image/bin/program
tar -C image -cf image.tar .

cat >container.sh <<'END'
library=/usr/lib/x86_64-linux-gnu
udocker() { venv/bin/python venv/bin/udocker --allow-root "$@" 2>&1; }
export UDOCKER_DIR=$PWD/udocker UDOCKER_TARBALL=/nonexistent HOME=$PWD
udocker mkrepo "$UDOCKER_DIR" >log
udocker import image.tar image:1 >>log
udocker create --name=program image:1 >>log
status=0
udocker setup --nvidia program >output || status=$?
echo "setup: status $status, $(sed -n 's/^Info: \(nvidia mode set\)/\1/p' output)"
cd udocker/containers/program/ROOT
for path in .$library/libcuda.so.1 .$library/libnvidia-ml.so.1 ./usr/bin/nvidia-smi; do
  target=$(readlink $path)
  echo "${path##*/} -> $target, $([ -e ".$target" ] && echo there || echo dangling)"
done
echo "on the host: libcuda.so.1 is $(readlink -f $library/libcuda.so.1)"
END
# The driver is installed in layers over this machine's directories, in a mount namespace that ends with this.
cat >host.sh <<'END'
mount -t tmpfs tmpfs layers
for name in usr etc var; do
  mkdir -p layers/$name layers/work-$name
  mount -t overlay overlay -o lowerdir=/$name,upperdir=layers/$name,workdir=layers/work-$name /$name
done
DEBIAN_FRONTEND=noninteractive "$@" >install 2>&1 || { cat install && exit 1; }
exec bash container.sh
END
unshare --mount bash -e host.sh apt-get "${options[@]}" --yes --no-install-recommends install \
  libcuda1=535.309.01-0+deb12u1 nvidia-smi=535.309.01-0+deb12u1 | tee seen
diff seen - <<'END'
setup: status 0, nvidia mode set
libcuda.so.1 -> /etc/alternatives/nvidia--libcuda.so.1-x86_64-linux-gnu, dangling
libnvidia-ml.so.1 -> /etc/alternatives/nvidia--libnvidia-ml.so.1-x86_64-linux-gnu, dangling
nvidia-smi -> /etc/alternatives/nvidia--nvidia-smi, dangling
on the host: libcuda.so.1 is /usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.309.01
END
