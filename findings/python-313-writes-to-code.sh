#!/bin/bash
# Packages:  python3.11-minimal 3.11.2-6+deb12u9 (Debian 12), python3.13-minimal 3.13.5-2+deb13u5 (13)
# Guess:     Code that ran often enough is specialized, and from then on only read. After a fork its pages stay shared
#            with the parent, like those of machine code.
# Behaviour: So it is with Python 3.11. Python 3.13 writes into the code at each conditional jump, for ever: 16 bits
#            behind it remember which way the last jumps went. A process of a forking server copies every page of code
#            that has an `if`, when it executes it, after gc.freeze and however warm the code is.
# Seen:
#   3.11: 1406 KiB of code with jumps: 272 KiB copied
#   3.11: 1054 KiB of code without: 152 KiB copied
#   3.13: 1406 KiB of code with jumps: 1644 KiB copied
#   3.13: 878 KiB of code without: 108 KiB copied
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only.
fetch() {
  mkdir -p "$1"/{sources,lists/partial,archives/partial}
  for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
    [ ! -f "$source" ] || sed "s/bookworm/$1/" "$source" >"$1/sources/${source##*/}"
  done
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/$1/sources"
    -o "Dir::State::lists=$PWD/$1/lists" -o "Dir::Cache=$PWD/$1" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$1" && apt-get "${options[@]}" download "${@:2}" && for package in *.deb; do dpkg -x "$package" root; done)
}
fetch bookworm python3.11-minimal=3.11.2-6+deb12u9 libpython3.11-minimal=3.11.2-6+deb12u9 libc6 libexpat1 zlib1g
fetch trixie python3.13-minimal=3.13.5-2+deb13u5 libpython3.13-minimal=3.13.5-2+deb13u5 libc6 libexpat1 zlib1g

cat >copied.py <<'END'
import gc
import os
import sys


def functions(line):
    """Return 10 functions of 9,000 such lines, which ran often enough."""
    found = []
    for number in range(10):
        names = {}
        exec("def function(a, b=0):\n" + line * 9000 + "    return b\n", names)
        found.append(names["function"])
        for _ in range(100):
            found[-1](1)
    return found


def copied(what):
    """Return the KiB that a forked process copies when it calls each function once."""

    def private():
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Private_Dirty:"))

    reader, writer = os.pipe()
    if not os.fork():
        before = private()
        for function in what:
            function(1)
        os.write(writer, str(private() - before).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reader, 16))


kinds = {"with jumps": "    if a > 2: b = a\n", "without": "    b = a > 2\n"}
every = {kind: functions(line) for kind, line in kinds.items()}
gc.freeze()
gc.disable()
few = {}
for kind, them in every.items():
    size = sum(len(function.__code__.co_code) for function in them) >> 10
    amount = copied(them)
    few[kind] = amount < size / 2
    print(f"{sys.version[:4]}: {size} KiB of code {kind}: {amount} KiB copied")
raise SystemExit(few != {"with jumps": sys.version_info < (3, 13), "without": True})
END

run() {
  local root=$PWD/$1/root
  "$(find "$root" -name ld-linux-x86-64.so.2 -type f)" \
    --library-path "$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/python$2" -ISS copied.py || { echo "this has changed" >&2; exit 1; }
}
run bookworm 3.11
run trixie 3.13
