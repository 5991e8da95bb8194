"""A gRPC server in this process, whose methods are functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped] # it ships no types

Methods = Mapping[str, tuple[Callable[[Any, Any], Any], type[Any]]]


def serve(path: str, service: str, methods: Methods) -> Any:
    """Begin to serve on a unix socket; returns the server, which somebody has to stop.

    Args:
        methods: by name, what answers (called with the request and the context), and the type of
            the request.
    """
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            answer, request.FromString, lambda message: message.SerializeToString()
        )
        for name, (answer, request) in methods.items()
    }
    server = grpc.server(ThreadPoolExecutor(max_workers=4, thread_name_prefix=service))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    assert server.add_insecure_port(f"unix:{path}")
    server.start()
    return server
