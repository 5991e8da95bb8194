#!/bin/bash
# Package:   containerd 2.1.9+ds1-5 (Debian sid)
# Guess:     "containerd config migrate" writes the main file in the current version. The drop-ins that it imports
#            stay as they are, and containerd still reads them.
# Behaviour: The result has the drop-ins' settings as well, as the main file's own, with all defaults. It still
#            imports them, but their version is the earlier one, so containerd takes nothing from them any longer: a
#            change of a drop-in has no effect, and without the drop-in its handler is still there. So an installer
#            that keeps its drop-in in version 2 cannot update its handler any longer, and no installer can remove it
#            with its drop-in.
# Seen (main file and drop-in of version 2; the drop-in has a handler with a BinaryName):
#   before: /usr/bin/first; imports *.toml
#   drop-in changed: /usr/bin/second; imports *.toml
#   migrated: /usr/bin/second; imports *.toml
#   migrated, drop-in changed: /usr/bin/second; imports *.toml
#   migrated, drop-in removed: /usr/bin/second; imports *.toml
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only. containerd and ctr need only libc.
fetch() {
  mkdir -p "$1"/{sources,lists/partial,archives/partial}
  # The archive of this machine; sid has no updates and no security archive.
  for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
    [ ! -f "$source" ] || sed -E "/^deb .* bookworm-/d; s/^(Suites: bookworm)-.*/\1-none\nEnabled: no/
      s/^Suites: bookworm .*/Suites: bookworm/; s/bookworm/$1/" "$source" >"$1/sources/${source##*/}"
  done
  options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/$1/sources"
    -o "Dir::State::lists=$PWD/$1/lists" -o "Dir::Cache=$PWD/$1" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$1" && apt-get "${options[@]}" download "${@:2}" && for package in *.deb; do dpkg -x "$package" root; done)
}
fetch sid containerd=2.1.9+ds1-5

mkdir conf.d
cat >main.toml <<END
version = 2
imports = ["$directory/conf.d/*.toml"]
END
write() {
  cat >conf.d/nvidia.toml <<END
version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "$1"
END
}
ask() {
  sid/root/usr/bin/containerd --config "$2" config dump 2>/dev/null >dump.toml
  python3 - "$1" <<'END'
import sys
import tomllib

with open("dump.toml", "rb") as file:
    dump = tomllib.load(file)
handlers = dump["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
name = handlers["nvidia"]["options"]["BinaryName"] if "nvidia" in handlers else "no handler"
print(f"{sys.argv[1]}: {name}; imports", *(path.rpartition("/")[2] for path in dump["imports"]))
END
}
{
  write /usr/bin/first
  ask "before" main.toml
  write /usr/bin/second
  ask "drop-in changed" main.toml
  sid/root/usr/bin/containerd --config main.toml config migrate 2>/dev/null >migrated.toml
  ask "migrated" migrated.toml
  write /usr/bin/third
  ask "migrated, drop-in changed" migrated.toml
  rm conf.d/nvidia.toml
  ask "migrated, drop-in removed" migrated.toml
} | tee seen
diff seen - <<'END'
before: /usr/bin/first; imports *.toml
drop-in changed: /usr/bin/second; imports *.toml
migrated: /usr/bin/second; imports *.toml
migrated, drop-in changed: /usr/bin/second; imports *.toml
migrated, drop-in removed: /usr/bin/second; imports *.toml
END
