#!/bin/bash
# Package:   nvidia-cuda-mps 535.309.01-0+deb12u1 (Debian 12, non-free)
# Guess:     MPS's limit of a device's memory is a number with a unit, as in "1.5G", and nonsense is refused.
# Behaviour: The control daemon reads digits, and a unit only if it follows at once. What it does not understand is a
#            number of megabytes or nothing: "1.5G", "1 G" and "1T" are 1 MB, "500K" is 500 MB, "0.5G" and "half" are no
#            limit at all. There is no message, and the exit status is 0. It answers rounded down, from 1 GB on in whole ones.
# Seen:
#   1G: 1G
#   1500M: 1G
#   1500MiB: 1G
#   1.5G: 1M
#   1 G: 1M
#   1T: 1M
#   500K: 500M
#   0.5G: no limit
#   half: no limit
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
for limit in 1G 1500M 1500MiB 1.5G '1 G' 1T 500K 0.5G half; do
  # The exit status of each is 0.
  said=$(echo "set_default_device_pinned_mem_limit 0 7G" | "$control")
  said+=$(echo "set_default_device_pinned_mem_limit 0 $limit" | "$control")
  now=$(echo "get_default_device_pinned_mem_limit 0" | "$control")
  echo "$limit: ${said:+said $said, }${now:-no limit}"
done | tee seen
diff seen - <<'END'
1G: 1G
1500M: 1G
1500MiB: 1G
1.5G: 1M
1 G: 1M
1T: 1M
500K: 500M
0.5G: no limit
half: no limit
END
