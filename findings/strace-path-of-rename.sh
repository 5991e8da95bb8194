#!/bin/bash
# Packages:  strace 6.1-0.1 (Debian 12), 6.13+ds-1 (13)
# Guess:     "strace -P FILE" traces each call that names FILE, so also the rename(2) by which a program replaces it, as
#            most programs write their configuration. With "-e inject" it makes that rename fail, or kills the program.
# Behaviour: Of rename(2) only the first path counts, the file's old name, which is often a random one. So the
#            replacement is neither shown nor injected into, without a word. Of link(2) both paths count, and so they do
#            of renameat(2) and renameat2(2), which glibc's rename() and Python's os.rename() do not call on x86-64.
# Seen (the same in both versions):
#   rename, new name: no
#   rename, old name: yes
#   renameat, new name: yes
#   renameat2, new name: yes
#   link, new name: yes
# Needs python3, on x86-64.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only.
fetch() {
  release=$1
  mkdir -p "$release"/{sources,lists/partial,archives/partial}
  # The archive of this machine.
  for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
    [ ! -f "$source" ] || sed "s/bookworm/$release/" "$source" >"$release/sources/${source##*/}"
  done
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/$release/sources"
    -o "Dir::State::lists=$PWD/$release/lists" -o "Dir::Cache=$PWD/$release" -o Debug::NoLocking=1
    -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$release" && apt-get "${options[@]}" download "${@:2}" && for deb in *.deb; do dpkg -x "$deb" root; done)
}
fetch bookworm strace=6.1-0.1 libunwind8
fetch trixie strace=6.13+ds-1 libc6 libunwind8 liblzma5 libgcc-s1

cat >calls.py <<'END'
import ctypes
import os
import sys

libc = ctypes.CDLL(None)
call, wanted, other = sys.argv[1], os.fsencode(sys.argv[2]), os.fsencode(sys.argv[3])
old, new = (wanted, other) if call.endswith("old name") else (other, wanted)
open(old, "w").close()
HERE, RENAMEAT = -100, 264
name = call.split(",")[0]
if name == "rename":
    os.rename(old, new)
elif name == "renameat":
    assert libc.syscall(RENAMEAT, HERE, old, HERE, new) == 0
elif name == "renameat2":
    assert libc.renameat2(HERE, old, HERE, new, 0) == 0
else:
    os.link(old, new)
END
look() {
  mkdir files
  "${@:2}" -f -o log -e trace=rename,renameat,renameat2,link -P "$directory/files/wanted" \
    /usr/bin/python3 calls.py "$1" "$directory/files/wanted" "$directory/files/other"
  if grep -q wanted log; then echo "$1: yes"; else echo "$1: no"; fi
  rm -r files
}
ask() {
  for call in "rename, new name" "rename, old name" "renameat, new name" "renameat2, new name" "link, new name"; do
    look "$call" "$@"
  done
}
LD_LIBRARY_PATH=$directory/bookworm/root/usr/lib/x86_64-linux-gnu ask bookworm/root/usr/bin/strace | tee bookworm.seen
libraries=$directory/trixie/root/usr/lib/x86_64-linux-gnu
ask "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" trixie/root/usr/bin/strace | tee trixie.seen
cat >expected <<'END'
rename, new name: no
rename, old name: yes
renameat, new name: yes
renameat2, new name: yes
link, new name: yes
END
diff bookworm.seen expected
diff trixie.seen expected
