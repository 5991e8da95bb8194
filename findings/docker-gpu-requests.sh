#!/bin/bash
# Packages:  docker.io 26.1.5+dfsg1-9+deb13u1+b1 (Debian 13), docker 7.2.0 (PyPI)
# Guess:     DeviceRequest(capabilities=[["gpu"]]) of Docker's Python library, whose count is optional, asks for all GPUs,
#            as a compose file without a count does. A further capability as "video" adds to the image's.
# Behaviour: Without a count the daemon adds NVIDIA's hook and no variable. So the image decides: one with
#            NVIDIA_VISIBLE_DEVICES=all, as CUDA's are, gets all GPUs, any other none. "video" replaces the image's
#            "compute,utility", so there is no CUDA. The daemon writes its variables behind those of the image: the
#            spec has both, and what reads the first one follows the image and not the user.
# Seen (what the spec has, in order):
#   CUDA's image, no count:         devices all; capabilities compute,utility; hook
#   another image, no count:        devices none; capabilities none; hook
#   CUDA's image, count 1:          devices all 0; capabilities compute,utility; hook
#   another image, count 1:         devices 0; capabilities none; hook
#   CUDA's image, GPU 2:            devices all 2; capabilities compute,utility; hook
#   CUDA's image, video, count -1:  devices all all; capabilities compute,utility video; hook
# Needs root, and python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'touch root/shared/done && wait || true; rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial image
mkdir -p root/{dev,etc,proc,run,shared,sys,tmp,usr/{bin,lib,lib64,sbin},var/lib}
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download docker.io=26.1.5+dfsg1-9+deb13u1+b1 containerd runc libc6 libdevmapper1.02.1 \
  libseccomp2 libsystemd0 libcap2 libselinux1 libudev1 libpcre2-8-0 busybox-static
for name in bin lib lib64 sbin; do ln -s usr/$name root/$name; done
for package in *.deb; do dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C root; done
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check docker==7.2.0

# The daemon looks for the hook's name. The runtime only keeps the spec and fails.
printf 'root:x:0:0::/root:/bin/sh\n' >root/etc/passwd
printf '#!/bin/busybox true\n' >root/usr/bin/nvidia-container-runtime-hook
cat >root/usr/bin/keep <<'END'
#!/bin/busybox sh
while [ $# -gt 0 ]; do
  [ "$1" != --bundle ] || busybox cp "$2/config.json" /shared
  shift
done
exit 1
END
chmod 755 root/usr/bin/{keep,nvidia-container-runtime-hook}
tar -cf image.tar image

# All that Docker makes is in file systems and processes that end with this.
cat >serve.sh <<'END'
mount --bind root root && cd root
mount -t proc none proc && mount --rbind /sys sys && mount --make-rslave sys && mount --rbind /dev dev
mount -t cgroup2 none sys/fs/cgroup
for name in run tmp var/lib; do mount -t tmpfs none $name; done
exec chroot . /bin/busybox sh -c '
  export PATH=/usr/sbin:/usr/bin HOME=/tmp
  dockerd --bridge none --iptables=false --ip6tables=false --storage-driver vfs -H unix:///shared/socket \
    --add-runtime keep=/usr/bin/keep --default-runtime keep &
  until [ -e /shared/done ]; do busybox sleep 0.2; done'
END
unshare --mount --net --pid --fork --kill-child sh serve.sh >log 2>&1 &
for _ in $(seq 150); do [ -S root/shared/socket ] || sleep 0.2; done

cat >ask.py <<'END'
import json
import os

import docker
from docker.types import DeviceRequest

GPU = [["gpu"]]
CUDA = ["ENV NVIDIA_VISIBLE_DEVICES=all", "ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
SPEC = "root/shared/config.json"
api = docker.APIClient(base_url=f"unix://{os.getcwd()}/root/shared/socket")
api.import_image("image.tar", repository="cuda", changes=CUDA)
api.import_image("image.tar", repository="other")


def ask(name, image, **asked):
    config = api.create_host_config(device_requests=[DeviceRequest(**asked)], network_mode="none")
    try:
        api.start(api.create_container(image, ["program"], host_config=config))
    except docker.errors.APIError:
        pass
    with open(SPEC, encoding="utf-8") as file:
        spec = json.load(file)
    os.unlink(SPEC)
    pairs = [entry.split("=", 1) for entry in spec["process"]["env"]]
    devices = [value for key, value in pairs if key == "NVIDIA_VISIBLE_DEVICES"] or ["none"]
    capabilities = [value for key, value in pairs if key == "NVIDIA_DRIVER_CAPABILITIES"] or ["none"]
    hook = "hook" if "nvidia-container-runtime-hook" in json.dumps(spec["hooks"]) else "no hook"
    print(f"{name}:".ljust(31), f"devices {' '.join(devices)}; capabilities {' '.join(capabilities)}; {hook}")


ask("CUDA's image, no count", "cuda", capabilities=GPU)
ask("another image, no count", "other", capabilities=GPU)
ask("CUDA's image, count 1", "cuda", count=1, capabilities=GPU)
ask("another image, count 1", "other", count=1, capabilities=GPU)
ask("CUDA's image, GPU 2", "cuda", device_ids=["2"], capabilities=GPU)
ask("CUDA's image, video, count -1", "cuda", count=-1, capabilities=[["gpu", "video"]])
END
venv/bin/python ask.py | tee seen || cat log
diff seen - <<'END'
CUDA's image, no count:         devices all; capabilities compute,utility; hook
another image, no count:        devices none; capabilities none; hook
CUDA's image, count 1:          devices all 0; capabilities compute,utility; hook
another image, count 1:         devices 0; capabilities none; hook
CUDA's image, GPU 2:            devices all 2; capabilities compute,utility; hook
CUDA's image, video, count -1:  devices all all; capabilities compute,utility video; hook
END
