"""Let a test fork although gRPC was used before in the same process.

A forked child lacks gRPC's threads. gRPC's fork handler recreates them, and aborts the child if
their descriptors were closed. Children of tests do not use gRPC, so the handler is disabled.

Source: gRPC, doc/environment_variables.md, ``GRPC_ENABLE_FORK_SUPPORT``.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"  # read when it is imported
