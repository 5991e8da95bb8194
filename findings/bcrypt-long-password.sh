#!/bin/bash
# Packages:  prometheus 2.42.0+ds-5+deb12u1, apache2-utils 2.4.71-1~deb12u1 (Debian 12), bcrypt 5.0.0 (PyPI)
# Guess:     A web configuration file with users works alike in every program that reads it: with Go's bcrypt, as in
#            Prometheus and its exporters, or with Python's.
# Behaviour: Not for a password of more than 72 bytes. htpasswd hashes it without a word, and Prometheus lets the user
#            in. Python's bcrypt refuses every such login since version 5: it raises ValueError where earlier
#            versions ignored what follows the first 72 bytes, as Go does.
# Seen:
#   htpasswd:        a hash, nothing on stderr
#   Prometheus:      200
#   Python's bcrypt: ValueError
#   its first 72:    True
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap '[ -z "${server:-}" ] || { kill "$server" && wait "$server" || true; }; rm -rf "$directory"' EXIT
cd "$directory"

apt-get -qq download prometheus=2.42.0+ds-5+deb12u1 apache2-utils=2.4.71-1~deb12u1 \
  libapr1=1.7.2-3+deb12u1 libaprutil1=1.6.3-1+deb12u1
for package in *.deb; do dpkg -x "$package" root; done
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check bcrypt==5.0.0

password=$(printf 'a word %.0s' {1..12})
hash=$(LD_LIBRARY_PATH=$directory/root/usr/lib/x86_64-linux-gnu \
  root/usr/bin/htpasswd -nbBC 4 user "$password" 2>stderr | sed -n 's/^user://p')
printf 'basic_auth_users:\n  user: %s\n' "$hash" >web.yml
echo 'global: {}' >prometheus.yml
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
root/usr/bin/prometheus --config.file=prometheus.yml --storage.tsdb.path=data --web.config.file=web.yml \
  --web.listen-address="127.0.0.1:$port" 2>log &
server=$!
cat >ask.py <<'END'
import base64
import sys
import time
import urllib.error
import urllib.request

port, password = sys.argv[1:]
word = base64.b64encode(f"user:{password}".encode()).decode()
request = urllib.request.Request(f"http://127.0.0.1:{port}/-/healthy", headers={"Authorization": f"Basic {word}"})
for _ in range(300):
    try:
        with urllib.request.urlopen(request) as answer:
            print(answer.status)
        break
    except urllib.error.HTTPError as error:
        print(error.code)
        break
    except OSError:
        time.sleep(0.1)
END
cat >check.py <<'END'
import sys

import bcrypt

hashed, password = (word.encode() for word in sys.argv[1:])
try:
    print("Python's bcrypt:", bcrypt.checkpw(password, hashed))
except ValueError as error:
    print("Python's bcrypt:", type(error).__name__)
print("its first 72:   ", bcrypt.checkpw(password[:72], hashed))
END
{
  [ "${hash:0:4}" != '$2y$' ] || echo "htpasswd:        a hash, $([ -s stderr ] && echo a warning || echo nothing) on stderr"
  echo "Prometheus:      $(python3 ask.py "$port" "$password")"
  venv/bin/python check.py "$hash" "$password"
} | tee seen
diff seen - <<'END'
htpasswd:        a hash, nothing on stderr
Prometheus:      200
Python's bcrypt: ValueError
its first 72:    True
END
