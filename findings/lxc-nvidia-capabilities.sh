#!/bin/bash
# Package:   liblxc-common 1:5.0.2-1+deb12u4 (Debian 12)
# Guess:     LXC's hook for NVIDIA reads an image's NVIDIA_VISIBLE_DEVICES and NVIDIA_DRIVER_CAPABILITIES as NVIDIA's
#            documentation says: without capabilities it is utility and compute, "all" is all of them, and ngx is one.
# Behaviour: Without capabilities it is utility alone: nvidia-smi works, and libcuda is not there. A list with ngx, or
#            with "all" and another, is an error, so the container does not start. "all" alone leaves out ngx. LXC 6
#            and 7 do the same.
# Seen:
#   NVIDIA_DRIVER_CAPABILITIES unset: --utility
#   NVIDIA_DRIVER_CAPABILITIES=compute,utility: --compute --utility
#   NVIDIA_DRIVER_CAPABILITIES=all: --compute --compat32 --display --graphics --utility --video
#   NVIDIA_DRIVER_CAPABILITIES=compute,utility,ngx: ERROR: Unknown driver capability "ngx".
#   NVIDIA_DRIVER_CAPABILITIES=utility,all: ERROR: Unknown driver capability "all".
# Needs root. Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download liblxc-common=1:5.0.2-1+deb12u4
dpkg -x liblxc-common_*.deb root

# A program that prints what the hook asks of NVIDIA's.
mkdir bin rootfs
cat >bin/nvidia-container-cli <<'END'
#!/bin/sh
for option; do
  case $option in
    --user | --no-cgroups | --device=* | --ldconfig=*) ;;
    --*) printf '%s ' "$option" ;;
  esac
done
END
chmod +x bin/nvidia-container-cli
chmod 755 "$directory" # for the user namespace

cat >ask.py <<'END'
import os
import subprocess

NAME = "NVIDIA_DRIVER_CAPABILITIES"
# As LXC starts a hook of a container without privileges.
HOOK = {
    "LXC_HOOK_VERSION": "1", "LXC_HOOK_SECTION": "lxc", "LXC_HOOK_TYPE": "mount", "LXC_LOG_LEVEL": "ERROR",
    "LXC_ROOTFS_MOUNT": f"{os.getcwd()}/rootfs", "PATH": f"{os.getcwd()}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
for value in (None, "compute,utility", "all", "compute,utility,ngx", "utility,all"):
    process = subprocess.Popen(
        ["unshare", "--user", "sh", "-c", "read go && exec root/usr/share/lxc/hooks/nvidia"],
        env={**HOOK, "NVIDIA_VISIBLE_DEVICES": "all", **({NAME: value} if value else {})},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    while os.readlink(f"/proc/{process.pid}/ns/user") == os.readlink("/proc/self/ns/user"):
        pass
    for kind in ("gid", "uid"):
        with open(f"/proc/{process.pid}/{kind}_map", "w", encoding="utf-8") as file:
            file.write("0 100000 65536")
    out, err = process.communicate("go\n")
    errors = [line for line in err.splitlines() if line.startswith("ERROR")]
    print(f"{NAME}{f'={value}' if value else ' unset'}: {out.strip() or ' '.join(errors) or err}", flush=True)
END
python3 ask.py | tee seen
diff seen - <<'END'
NVIDIA_DRIVER_CAPABILITIES unset: --utility
NVIDIA_DRIVER_CAPABILITIES=compute,utility: --compute --utility
NVIDIA_DRIVER_CAPABILITIES=all: --compute --compat32 --display --graphics --utility --video
NVIDIA_DRIVER_CAPABILITIES=compute,utility,ngx: ERROR: Unknown driver capability "ngx".
NVIDIA_DRIVER_CAPABILITIES=utility,all: ERROR: Unknown driver capability "all".
END
