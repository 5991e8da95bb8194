#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1 (Debian 12)
# Guess:     A seccomp profile answers a system call that it does not list with its default, here EPERM, in every
#            runtime. To allow one more system call changes the answer for that one only.
# Behaviour: runc answers ENOSYS for all system calls that are newer than the newest of the profile, so that programs
#            do without them. So if a newer one is allowed, as futex_waitv, all that are older than it and not listed
#            change from ENOSYS to EPERM. glibc does without clone3 for ENOSYS only, so a program with glibc 2.34 or
#            later cannot start a thread. crun always has EPERM, so an old profile that works with runc does not work
#            with crun. runc up to 1.3 and crun up to 1.28 do the same.
# Seen (the old profile allows all system calls that are older than clone3):
#   runc, an old profile: clone3 ENOSYS, thread works
#   runc, the old profile and futex_waitv: clone3 EPERM, thread Operation not permitted
#   crun, an old profile: clone3 EPERM, thread Operation not permitted
#   crun, the old profile and futex_waitv: clone3 EPERM, thread Operation not permitted
# Needs root and gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1 \
  musl-dev=1.2.3-1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{bin,dev,lib,opt,proc,sys}
cp root/bin/busybox rootfs/bin/sh
root/usr/sbin/runc spec
cat >ask.c <<'END'
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void *nothing(void *unused) { return unused; }

int main(void) {
  pthread_t thread;
  /* Without arguments the kernel's answer is EINVAL. */
  syscall(SYS_clone3, NULL, 0);
  printf("clone3 %s, ", strerrorname_np(errno));
  int error = pthread_create(&thread, NULL, nothing, NULL);
  printf("thread %s\n", error ? strerror(error) : "works");
}
END
gcc -static -o rootfs/bin/ask ask.c

cat >run.py <<'END'
import copy
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



with open("root/usr/include/x86_64-linux-musl/bits/syscall.h", encoding="utf-8") as file:
    NUMBERS = {name: int(number) for name, number in re.findall(r"define __NR_(\w+)\s+(\d+)", file.read())}
OLD = [name for name, number in NUMBERS.items() if number < NUMBERS["clone3"]]


def change(names):
    def with_seccomp(spec):
        rule = {"names": names, "action": "SCMP_ACT_ALLOW"}
        spec["linux"]["seccomp"] = {
            "defaultAction": "SCMP_ACT_ERRNO", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": [rule]
        }

    return with_seccomp


for runtime in RUNTIMES:
    for what, names in {"an old profile": OLD, "the old profile and futex_waitv": [*OLD, "futex_waitv"]}.items():
        done = run(runtime, "run", ["/bin/ask"], change=change(names))
        print(f"{runtime}, {what}: {done.stdout.strip() or done.stderr}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, an old profile: clone3 ENOSYS, thread works
runc, the old profile and futex_waitv: clone3 EPERM, thread Operation not permitted
crun, an old profile: clone3 EPERM, thread Operation not permitted
crun, the old profile and futex_waitv: clone3 EPERM, thread Operation not permitted
END
