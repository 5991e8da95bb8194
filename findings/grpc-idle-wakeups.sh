#!/bin/bash
# Package:   grpcio 1.85.1 (PyPI), Python 3.11, Linux
# Behaviour: a server of grpc.aio on a unix socket that nobody has ever connected to wakes up several times a second:
#            seven threads of gRPC's core are there besides Python's own, and two of them (lifeguard, global timer) wake
#            once a second, three of the thread pool up to a few times each. No option and none of the experiments that
#            its library names (event_engine_listener, event_engine_client, event_engine_fork), nor
#            GRPC_ENABLE_FORK_SUPPORT=0, brings it below four a second.
# Guess:     an idle server waits in epoll_wait without a time limit: no wake-ups, and one thread more than Python's.
# Seen:      threads 8, wake-ups a second 4.5 (4.4 to 7.4 in seven runs of ten seconds)
set -euo pipefail

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check grpcio==1.85.1

cat >idle.py <<'PY'
import asyncio
import glob

from grpc import aio


def waits():
    found = {}
    for path in glob.glob("/proc/self/task/*/status"):
        with open(path) as file:
            lines = dict(line.split(":\t", 1) for line in file if ":\t" in line)
        found[path] = lines["Name"].strip(), int(lines["voluntary_ctxt_switches"])
    return found


async def main():
    server = aio.server()
    server.add_insecure_port("unix:idle.sock")
    await server.start()
    await asyncio.sleep(3)
    before = waits()
    await asyncio.sleep(10)
    after = waits()
    rows = [(name, (count - before.get(path, ("", 0))[1]) / 10) for path, (name, count) in after.items()]
    for name, rate in sorted(rows, key=lambda row: -row[1]):
        print(f"{name:18}{rate:5.1f} a second")
    total = sum(rate for _, rate in rows)
    print(f"threads {len(rows)}, wake-ups a second {total:.1f}")
    await server.stop(0)
    return 0 if len(rows) > 4 and total > 2 else 1


raise SystemExit(asyncio.run(main()))
PY
venv/bin/python idle.py || { echo "this has changed" >&2; exit 1; }
