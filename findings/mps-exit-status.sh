#!/bin/bash
# Package:   nvidia-cuda-mps 535.309.01-0+deb12u1 (Debian 12, non-free)
# Guess:     The control program of MPS fails if the daemon refuses a command: its exit status says so, or stderr.
# Behaviour: The exit status is 0 for a value that is out of range and for a command that does not exist; there is an
#            error only if no daemon answers. A refused percentage is answered with the old one, as if it were the new.
#            A number is read as far as it goes: "33,3" is 33. So each setting has to be read back and compared.
# Seen:
#   set_default_active_thread_percentage 25: 25.0, status 0
#   set_default_active_thread_percentage 150: 25.0, status 0
#   set_default_active_thread_percentage 0: 25.0, status 0
#   set_default_active_thread_percentage half: 25.0, status 0
#   set_default_active_thread_percentage 33,3: 33.0, status 0
#   nonsense: Unknown command "nonsense", status 0
#   after quit: Cannot find MPS control daemon process, status 1
# Needs no GPU.
set -euo pipefail
directory=$(mktemp -d)
trap '[ ! -S pipe/control ] || echo quit | "$control" 2>/dev/null || true; rm -rf "$directory"' EXIT
cd "$directory"

# apt with the lists of this machine's archive and its non-free part, in this directory only.
mkdir -p sources lists/partial archives/partial pipe log
for source in /etc/apt/{sources.list,sources.list.d/debian.sources}; do
  [ ! -f "$source" ] || sed -E "s/^(Components:|deb .* bookworm[^ ]*) main.*/\1 main non-free/" \
    "$source" >"sources/${source##*/}"
done
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$PWD/sources" -o "Dir::State::lists=$PWD/lists"
  -o "Dir::Cache=$PWD" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
apt-get "${options[@]}" download nvidia-cuda-mps=535.309.01-0+deb12u1
dpkg -x nvidia-cuda-mps_*.deb root
control=$(find "$PWD/root" -name nvidia-cuda-mps-control -type f)
export CUDA_MPS_PIPE_DIRECTORY=$PWD/pipe CUDA_MPS_LOG_DIRECTORY=$PWD/log
"$control" -d
until [ -S pipe/control ]; do sleep 0.1; done
ask() {
  status=0
  answer=$(echo "$1" | "$control" 2>&1) || status=$?
  echo "${2:-$1}: $answer, status $status"
}
{
  for percentage in 25 150 0 half 33,3; do ask "set_default_active_thread_percentage $percentage"; done
  ask nonsense
  echo quit | "$control"
  while echo get_server_list | "$control" >/dev/null 2>&1; do sleep 0.1; done
  ask get_server_list "after quit"
} | tee seen
diff seen - <<'END'
set_default_active_thread_percentage 25: 25.0, status 0
set_default_active_thread_percentage 150: 25.0, status 0
set_default_active_thread_percentage 0: 25.0, status 0
set_default_active_thread_percentage half: 25.0, status 0
set_default_active_thread_percentage 33,3: 33.0, status 0
nonsense: Unknown command "nonsense", status 0
after quit: Cannot find MPS control daemon process, status 1
END
