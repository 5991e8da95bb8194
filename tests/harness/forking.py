"""Let a test fork although gRPC was used before it in the same process.

gRPC's own threads are not in a child. What it calls there after a fork to have them again aborts
the child when their descriptors were closed. Children of tests use no gRPC.

Source: gRPC, doc/environment_variables.md, ``GRPC_ENABLE_FORK_SUPPORT``.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"  # read when it is imported
