#!/bin/bash
# Package:   grpcio 1.85.1 (PyPI)
# Guess:     A gRPC server does not bind a unix socket that another process serves ("Address already in use"), and when
#            it stops, it removes its own socket and no other.
# Behaviour: It removes any socket at the path before it binds, even one with a listening process: the first
#            server gets no new connection from then on. When the first stops, it removes what is at the path then, the
#            second's socket: the second still runs, and clients cannot connect to it. Two instances that hand over,
#            as in a rolling update of a kubelet plugin, need a path each, or a name in between and a rename.
# Seen:
#   one server:        first
#   a second one:      second
#   the first stopped: nobody, no socket
# Needs python3 with venv.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check grpcio==1.85.1
cat >servers.py <<'END'
import os
from concurrent import futures

import grpc

ADDRESS = "unix:socket"


class Named(grpc.GenericRpcHandler):
    def __init__(self, name):
        self.name = name

    def service(self, _):
        return grpc.unary_unary_rpc_method_handler(lambda *_: self.name.encode())


def started(name):
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Named(name),))
    server.add_insecure_port(ADDRESS)
    server.start()
    return server


def reached():
    with grpc.insecure_channel(ADDRESS) as channel:
        try:
            return channel.unary_unary("/a/b")(b"", timeout=5).decode()
        except grpc.RpcError:
            return "nobody"


first = started("first")
print(f"one server:        {reached()}")
second = started("second")
print(f"a second one:      {reached()}")
first.stop(0).wait()
del first
print(f"the first stopped: {reached()}, {'its' if os.path.exists('socket') else 'no'} socket")
second.stop(0).wait()
END
venv/bin/python servers.py | tee seen
diff seen - <<'END'
one server:        first
a second one:      second
the first stopped: nobody, no socket
END
