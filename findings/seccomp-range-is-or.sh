#!/bin/bash
# Packages:  runc 1.1.5+ds1-1+deb12u1, crun 1.8.1-1+deb12u1, libseccomp2 2.5.4-1+deb12u1 (Debian 12)
# Guess:     The conditions of a rule in a seccomp profile (args) all have to hold, as the runtime specification's
#            "specific syscall" and seccomp_rule_add(3) of libseccomp have it. So two of them make a range, as for the
#            ioctl requests of one driver.
# Behaviour: All have to hold only if each is about another argument. If two are about the same one, runc and crun make
#            a rule of each condition: any of them is enough, also of those about other arguments. So a range applies
#            to nearly every value. libseccomp itself refuses such a rule. A range needs a mask (SCMP_CMP_MASKED_EQ).
#            Runtimes up to runc 1.3 and crun up to 1.28 do the same.
# Seen (the profile allows all but what the rule is about: mkdirat in three directories, opened as 10, 11 and 12):
#   runc, args[0] == 11: 11 refused
#   runc, args[0] > 10 and args[0] < 12: 10 11 12 refused
#   runc, args[0] == 11 and args[2] == 0: none refused
#   runc, args[0] == 8 and args[0] == 9 and args[2] == 448: 10 11 12 refused
#   crun, args[0] == 11: 11 refused
#   crun, args[0] > 10 and args[0] < 12: 10 11 12 refused
#   crun, args[0] == 11 and args[2] == 0: none refused
#   crun, args[0] == 8 and args[0] == 9 and args[2] == 448: 10 11 12 refused
#   libseccomp, args[0] > 10 and args[0] < 12: Invalid argument
# Needs root and gcc.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download runc=1.1.5+ds1-1+deb12u1 crun=1.8.1-1+deb12u1 libyajl2=2.1.0-3+deb12u2 \
  libseccomp2=2.5.4-1+deb12u1 busybox-static=1:1.35.0-4+deb12u1+b1
for package in *.deb; do dpkg -x "$package" root; done
export LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu
mkdir -p rootfs/{dev,proc,sys,10,11,12}
cat >ask.c <<'END'
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

int main(void) {
  for (int number = 10; number < 13; number++) {
    char name[4];
    sprintf(name, "/%d", number);
    dup2(open(name, O_RDONLY | O_DIRECTORY), number);
    if (mkdirat(number, "new", 0700) && errno == ENOLINK) printf("%d ", number);
    unlinkat(number, "new", AT_REMOVEDIR);
  }
}
END
gcc -static -o rootfs/ask ask.c
root/usr/sbin/runc spec

cat >run.py <<'END'
import ctypes
import errno
import json
import os
import pathlib
import subprocess
import sys

# crun refuses a host with cgroups of both versions, so it does not see the second.
HIDDEN = "umount -l /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\""
CRUN = ["unshare", "--mount", "--propagation=slave", "sh", "-c", HIDDEN, "sh", "root/usr/bin/crun"]
RUNTIMES = {"runc": ["root/usr/sbin/runc"], "crun": CRUN}
# The names of libseccomp's comparisons, and their numbers.
SIGNS = {"==": ("SCMP_CMP_EQ", 4), ">": ("SCMP_CMP_GT", 6), "<": ("SCMP_CMP_LT", 2)}
RANGE = [(0, ">", 10), (0, "<", 12)]
# The mode, args[2], is 448 (0700).
RULES = ([(0, "==", 11)], RANGE, [(0, "==", 11), (2, "==", 0)], [(0, "==", 8), (0, "==", 9), (2, "==", 448)])
config = pathlib.Path("config.json")
spec = json.loads(config.read_text(encoding="utf-8"))
spec["process"].update(terminal=False, args=["/ask"])
spec["root"]["readonly"] = False


def text(conditions):
    return " and ".join(f"args[{index}] {sign} {value}" for index, sign, value in conditions)


for number, (name, runtime) in enumerate(RUNTIMES.items()):
    for conditions in RULES:
        args = [{"index": index, "op": SIGNS[sign][0], "value": value} for index, sign, value in conditions]
        rule = {"names": ["mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOLINK, "args": args}
        spec["linux"]["seccomp"] = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}
        config.write_text(json.dumps(spec), encoding="utf-8")
        argv = [*runtime, f"--root={os.getcwd()}/state", "run", f"finding-{sys.argv[1]}-{number}"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, text=True, capture_output=True)
        print(f"{name}, {text(conditions)}: {done.stderr.strip() or done.stdout.strip() or 'none'} refused")


class Condition(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


library = ctypes.CDLL("libseccomp.so.2")
library.seccomp_init.restype = ctypes.c_void_p
library.seccomp_init.argtypes = [ctypes.c_uint32]
add = library.seccomp_rule_add_array
add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
conditions = (Condition * 2)(*((index, SIGNS[sign][1], value, 0) for index, sign, value in RANGE))
call = library.seccomp_syscall_resolve_name(b"mkdirat")
# SCMP_ACT_ALLOW is the default, SCMP_ACT_ERRNO the rule's action.
error = add(library.seccomp_init(0x7FFF0000), 0x00050000 | errno.ENOLINK, call, 2, conditions)
print(f"libseccomp, {text(RANGE)}: {os.strerror(-error)}")
END
python3 run.py $$ | tee seen
diff seen - <<'END'
runc, args[0] == 11: 11 refused
runc, args[0] > 10 and args[0] < 12: 10 11 12 refused
runc, args[0] == 11 and args[2] == 0: none refused
runc, args[0] == 8 and args[0] == 9 and args[2] == 448: 10 11 12 refused
crun, args[0] == 11: 11 refused
crun, args[0] > 10 and args[0] < 12: 10 11 12 refused
crun, args[0] == 11 and args[2] == 0: none refused
crun, args[0] == 8 and args[0] == 9 and args[2] == 448: 10 11 12 refused
libseccomp, args[0] > 10 and args[0] < 12: Invalid argument
END
