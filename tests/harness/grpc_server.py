"""A gRPC server in this process, whose methods are functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped] # it ships no types

Methods = Mapping[str, tuple[Callable[[Any, Any], Any], type[Any]]]


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A server that runs until it is stopped."""

    _server: Any
    _workers: ThreadPoolExecutor

    def stop(self) -> None:
        """Refuse new calls, and cancel those that are in progress."""
        self._server.stop(None).wait()
        # gRPC leaves the threads to the garbage collector.
        self._workers.shutdown(wait=False)


def serve(path: str, service: str, methods: Methods) -> GrpcServer:
    """Serve on a unix socket; return the server, which the caller has to stop.

    Args:
        methods: by name, the handler (called with the request and the context), and the type of
            the request.
    """
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            answer, request.FromString, lambda message: message.SerializeToString()
        )
        for name, (answer, request) in methods.items()
    }
    workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix=service)
    server = grpc.server(workers)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    assert server.add_insecure_port(f"unix:{path}")
    server.start()
    return GrpcServer(server, workers)
