#!/bin/bash
# Package:   podman 5.4.2+ds1-2+b2 (Debian 13)
# Guess:     "AddDevice=-NAME" in a quadlet adds a device if it is there: a CDI device if a CDI file defines it, as the
#            option without "-" takes a CDI device.
# Behaviour: The generator looks for a file of that name. For a CDI device there is none (it would be below the current
#            directory), so it is always left out, without a word: the service runs without a GPU on a node that has
#            one.
# Seen (what the service's podman run has):
#   AddDevice=nvidia.com/gpu=0:   --device nvidia.com/gpu=0
#   AddDevice=-nvidia.com/gpu=0:  nothing
#   AddDevice=-/dev/zero:         --device /dev/zero
#   AddDevice=-/dev/no-such:      nothing
# Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with Debian 13's lists, in this directory only.
mkdir -p sources lists/partial archives/partial units
for source in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
  [ ! -f "$source" ] || sed 's/bookworm/trixie/g' "$source" >"sources/${source##*/}"
done
: >status
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::State::status=$PWD/status" -o "Dir::Cache=$PWD" -o APT::Install-Recommends=false
  -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download podman=5.4.2+ds1-2+b2
dpkg -x podman_*.deb root

ask() {
  printf '[Container]\nImage=image\nAddDevice=%s\n' "$1" >units/program.container
  found=$(QUADLET_UNIT_DIRS=$PWD/units root/usr/libexec/podman/quadlet --dryrun 2>/dev/null |
    sed -nE 's/^ExecStart=.* (--device [^ ]*) .*/\1/p')
  printf '%-29s %s\n' "AddDevice=$1:" "${found:-nothing}"
}
{
  ask nvidia.com/gpu=0
  ask -nvidia.com/gpu=0
  ask -/dev/zero
  ask -/dev/no-such
} | tee seen
diff seen - <<'END'
AddDevice=nvidia.com/gpu=0:   --device nvidia.com/gpu=0
AddDevice=-nvidia.com/gpu=0:  nothing
AddDevice=-/dev/zero:         --device /dev/zero
AddDevice=-/dev/no-such:      nothing
END
