#!/bin/bash
# Packages:  containerd 1.6.20~ds1-1+deb12u3 (Debian 12), 1.7.24~ds1-6+deb13u1 (13), 2.1.9+ds1-5 (sid)
# Guess:     The keys of containerd's configuration are case-sensitive in each version, as TOML's are, and a key that is
#            misspelled by its letters' case is ignored as any misspelled one.
# Behaviour: That is so with 1.6 and 1.7. containerd 2.1 reads them without regard to case. So a line that had no effect
#            for years counts after an update. And with two spellings in the main file and a drop-in, which other TOML
#            programs take for two keys, the one in lower case wins, also if it is the main file's: the drop-in of an
#            installer has no effect.
# Seen:
#   1.6.20, default_runtime_name: main
#   1.6.20, Default_Runtime_Name: runc
#   1.7.24, default_runtime_name: main
#   1.7.24, Default_Runtime_Name: runc
#   2.1.9, default_runtime_name: main
#   2.1.9, Default_Runtime_Name: main
#   2.1.9, default_runtime_name, then default_runtime_name: drop_in
#   2.1.9, Default_Runtime_Name, then default_runtime_name: drop_in
#   2.1.9, default_runtime_name, then Default_Runtime_Name: main
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

# apt with a release's lists, in this directory only. The programs need only libc.
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
  (cd "$1" && apt-get "${options[@]}" download "containerd=$2" && dpkg -x containerd_*.deb root)
}
fetch bookworm 1.6.20~ds1-1+deb12u3
fetch trixie 1.7.24~ds1-6+deb13u1
fetch sid 2.1.9+ds1-5

cat >ask.py <<'END'
import os
import subprocess
import tomllib

CRI1, CRI2 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
LOWER, OTHER = "default_runtime_name", "Default_Runtime_Name"


def default(release, **keys):
    """Return the default handler if the main file and a drop-in have these keys for it."""
    version, plugin = (3, CRI2) if release == "sid" else (2, CRI1)
    for name, key in keys.items():
        imports = f'imports = ["{os.getcwd()}/drop_in.toml"]\n' if "drop_in" in keys and name == "main" else ""
        with open(f"{name}.toml", "w", encoding="utf-8") as file:
            file.write(f'version = {version}\n{imports}[plugins."{plugin}".containerd]\n{key} = "{name}"\n')
    argv = [f"{release}/root/usr/bin/containerd", "--config", "main.toml", "config", "dump"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return tomllib.loads(done.stdout)["plugins"][plugin]["containerd"][LOWER]


for release, version in {"bookworm": "1.6.20", "trixie": "1.7.24", "sid": "2.1.9"}.items():
    for key in (LOWER, OTHER):
        print(f"{version}, {key}: {default(release, main=key)}")
for first, second in ((LOWER, LOWER), (OTHER, LOWER), (LOWER, OTHER)):
    print(f"2.1.9, {first}, then {second}: {default('sid', main=first, drop_in=second)}")
END
python3 ask.py | tee seen
diff seen - <<'END'
1.6.20, default_runtime_name: main
1.6.20, Default_Runtime_Name: runc
1.7.24, default_runtime_name: main
1.7.24, Default_Runtime_Name: runc
2.1.9, default_runtime_name: main
2.1.9, Default_Runtime_Name: main
2.1.9, default_runtime_name, then default_runtime_name: drop_in
2.1.9, Default_Runtime_Name, then default_runtime_name: drop_in
2.1.9, default_runtime_name, then Default_Runtime_Name: main
END
