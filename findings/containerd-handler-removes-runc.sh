#!/bin/bash
# Packages:  containerd 1.6.20~ds1-1+deb12u3 (Debian 12), 1.7.24~ds1-6+deb13u1 (13), 2.1.9+ds1-5 (sid)
# Guess:     A configuration that only adds a handler leaves the built-in one, runc, as it is: "containerd config
#            dump" shows runc without a configuration. And "config dump" fails if containerd cannot work with the
#            file.
# Behaviour: With 1.6 and 1.7 the built-in handler is gone as soon as a file has another one. It is still the default,
#            so the CRI plugin does not load: no pod starts on the node. containerd itself starts and runs, with a
#            line in its log, and "config dump" has the status 0. 2.1 keeps runc.
# Seen:
#   1.6.20, file has none: config dump: runc, status 0; CRI works
#   1.6.20, file has nvidia: config dump: nvidia, status 0; CRI does not load
#   1.6.20, file has nvidia and runc: config dump: nvidia and runc, status 0; CRI works
#   1.7.24, file has none: config dump: runc, status 0; CRI works
#   1.7.24, file has nvidia: config dump: nvidia, status 0; CRI does not load
#   1.7.24, file has nvidia and runc: config dump: nvidia and runc, status 0; CRI works
#   2.1.9, file has none: config dump: runc, status 0; CRI works
#   2.1.9, file has nvidia: config dump: nvidia and runc, status 0; CRI works
#   2.1.9, file has nvidia and runc: config dump: nvidia and runc, status 0; CRI works
# Needs root.
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
fetch bookworm containerd=1.6.20~ds1-1+deb12u3
fetch trixie containerd=1.7.24~ds1-6+deb13u1
fetch sid containerd=2.1.9+ds1-5

cat >ask.py <<'END'
import os
import subprocess
import time
import tomllib

HERE = os.getcwd()
for version, release in {"1.6.20": "bookworm", "1.7.24": "trixie", "2.1.9": "sid"}.items():
    cri = "io.containerd.cri.v1.runtime" if release == "sid" else "io.containerd.grpc.v1.cri"
    programs = f"{release}/root/usr/bin"
    for what in ([], ["nvidia"], ["nvidia", "runc"]):
        config, socket = f"{version}.toml", f"{HERE}/{version}-{len(what)}.sock"
        with open(config, "w", encoding="utf-8") as file:
            file.write(f'version = {3 if release == "sid" else 2}\nroot = "{HERE}/root"\nstate = "{HERE}/state"\n')
            file.write(f'[grpc]\naddress = "{socket}"\n')
            for name in what:
                file.write(f'[plugins."{cri}".containerd.runtimes.{name}]\nruntime_type = "io.containerd.runc.v2"\n')
        command = [f"{programs}/containerd", "--config", config]
        dump = subprocess.run([*command, "config", "dump"], capture_output=True, text=True)
        found = tomllib.loads(dump.stdout)["plugins"][cri]["containerd"]["runtimes"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not os.path.exists(socket):
            time.sleep(0.1)
        plugins = subprocess.run(
            [f"{programs}/ctr", "--address", socket, "plugins", "ls"], capture_output=True, text=True
        )
        works = all(line.split()[-1] == "ok" for line in plugins.stdout.splitlines() if " cri " in line)
        process.terminate()
        process.wait()
        print(
            f"{version}, file has {' and '.join(what) or 'none'}: config dump: {' and '.join(sorted(found))}, "
            f"status {dump.returncode}; CRI {'works' if works else 'does not load'}"
        )
END
# All processes end with the first one. /run is not this machine's.
unshare --mount --net --pid --fork --kill-child --mount-proc sh -c \
  'mount -t tmpfs tmpfs /run && exec python3 ask.py' | tee seen
diff seen - <<'END'
1.6.20, file has none: config dump: runc, status 0; CRI works
1.6.20, file has nvidia: config dump: nvidia, status 0; CRI does not load
1.6.20, file has nvidia and runc: config dump: nvidia and runc, status 0; CRI works
1.7.24, file has none: config dump: runc, status 0; CRI works
1.7.24, file has nvidia: config dump: nvidia, status 0; CRI does not load
1.7.24, file has nvidia and runc: config dump: nvidia and runc, status 0; CRI works
2.1.9, file has none: config dump: runc, status 0; CRI works
2.1.9, file has nvidia: config dump: nvidia and runc, status 0; CRI works
2.1.9, file has nvidia and runc: config dump: nvidia and runc, status 0; CRI works
END
