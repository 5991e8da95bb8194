#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1, musl-dev 1.2.3-1 (Debian 12)
# Guess:     A seccomp profile that allows an ioctl by its number (args, SCMP_CMP_EQ) does so for every program.
# Behaviour: Not for a program with musl, as in Alpine's images, if the number's highest bit is set. It is set for all
#            requests that give something back, so for nearly all of DRM's and for those of /dev/nvidiactl. musl's
#            ioctl takes an int, and sign-extends it to 64 bits; seccomp compares 64 bits, and the kernel's driver
#            reads 32. glibc's takes an unsigned long. A profile that was tested with glibc needs SCMP_CMP_MASKED_EQ
#            with 0xffffffff. Runtimes up to runc 1.3 and crun 1.28 do the same.
# Seen:
#   runc, glibc: TCGETS allowed, DRM_IOCTL_VERSION allowed
#   runc, musl: TCGETS allowed, DRM_IOCTL_VERSION not permitted
#   runc, musl, 32 bits compared: TCGETS allowed, DRM_IOCTL_VERSION allowed
#   crun, glibc: TCGETS allowed, DRM_IOCTL_VERSION allowed
#   crun, musl: TCGETS allowed, DRM_IOCTL_VERSION not permitted
#   crun, musl, 32 bits compared: TCGETS allowed, DRM_IOCTL_VERSION allowed
# Needs root and gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1 \
  musl=1.2.3-1 musl-dev=1.2.3-1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,lib,opt,proc,sys}
cp root/bin/busybox rootfs/bin/sh
root/usr/sbin/runc spec
cat >ask.c <<'END'
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/ioctl.h>

int main(void) {
  int null = open("/dev/null", O_RDWR);
  unsigned long requests[] = {0x5401, 0xc0406400};
  for (int i = 0; i < 2; i++)
    printf("%d\n", ioctl(null, requests[i], 0) ? errno : 0);
}
END
gcc -static -o rootfs/bin/glibc ask.c
musl=$directory/root/usr/lib/x86_64-linux-musl
gcc -static -nostdinc -isystem root/usr/include/x86_64-linux-musl -nostdlib -o rootfs/bin/musl \
  "$musl/crt1.o" ask.c "$musl/libc.a"

cat >run.py <<'END'
import copy
import errno
import json
import os
import re
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh", "root/usr/bin/crun"]
RUNTIMES = {"runc": ["root/usr/sbin/runc"], "crun": CRUN}
NAME = f"finding-{sys.argv[1]}"
with open("config.json", encoding="utf-8") as file:
    USUAL = json.load(file)
USUAL["process"]["terminal"] = USUAL["root"]["readonly"] = False


def run(runtime, verb, args=(), **more):
    """Run a verb of the runtime, with a spec that change has changed if there are args."""
    if args:
        spec = copy.deepcopy(USUAL)
        spec["process"]["args"] = list(args)
        more["change"](spec)
        with open("config.json", "w", encoding="utf-8") as file:
            json.dump(spec, file)
    command = [*RUNTIMES[runtime], f"--root={os.getcwd()}/state", *verb.split(), NAME]
    return subprocess.run(command, stdin=subprocess.DEVNULL, text=True, capture_output=True)



NUMBERS = {"TCGETS": 0x5401, "DRM_IOCTL_VERSION": 0xC0406400}


def change(masked):
    if masked:
        argument = {"index": 1, "op": "SCMP_CMP_MASKED_EQ", "value": 0xFFFFFFFF}
        compared = [{**argument, "valueTwo": number} for number in NUMBERS.values()]
    else:
        compared = [{"index": 1, "op": "SCMP_CMP_EQ", "value": number} for number in NUMBERS.values()]
    with open("root/usr/include/x86_64-linux-musl/bits/syscall.h", encoding="utf-8") as file:
        others = [name for name in re.findall(r"#define __NR_(\w+)", file.read()) if name != "ioctl"]
    rules = [{"names": others, "action": "SCMP_ACT_ALLOW"}]
    rules += [{"names": ["ioctl"], "action": "SCMP_ACT_ALLOW", "args": [each]} for each in compared]

    def with_seccomp(spec):
        spec["linux"]["seccomp"] = {
            "defaultAction": "SCMP_ACT_ERRNO", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": rules
        }

    return with_seccomp


for runtime in RUNTIMES:
    for libc, masked in (("glibc", False), ("musl", False), ("musl", True)):
        done = run(runtime, "run", [f"/bin/{libc}"], change=change(masked))
        found = dict(zip(NUMBERS, map(int, done.stdout.split())))
        # The null device has no ioctl: ENOTTY comes from the kernel behind the filter.
        words = {errno.ENOTTY: "allowed", errno.EPERM: "not permitted"}
        text = ", ".join(f"{name} {words.get(number, number)}" for name, number in found.items()) or done.stderr
        print(f"{runtime}, {libc}{', 32 bits compared' if masked else ''}: {text}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, glibc: TCGETS allowed, DRM_IOCTL_VERSION allowed
runc, musl: TCGETS allowed, DRM_IOCTL_VERSION not permitted
runc, musl, 32 bits compared: TCGETS allowed, DRM_IOCTL_VERSION allowed
crun, glibc: TCGETS allowed, DRM_IOCTL_VERSION allowed
crun, musl: TCGETS allowed, DRM_IOCTL_VERSION not permitted
crun, musl, 32 bits compared: TCGETS allowed, DRM_IOCTL_VERSION allowed
END
