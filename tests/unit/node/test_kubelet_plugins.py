"""The stand-in for a kubelet in tests of device plugins."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from api.proto import deviceplugin_pb2 as pb
from tests.harness.kubelet_plugins import VERSION, KubeletPlugins
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

SERVICE = "v1beta1.Registration"


def test_it_does_not_dial_a_plugin_that_is_gone_after_its_own_end(short_path: Path) -> None:
    request = pb.RegisterRequest(
        version=VERSION, endpoint="gone.sock", resource_name="nvidia.com/gpu"
    )
    with KubeletPlugins(str(short_path)) as kubelet:
        with grpc.insecure_channel(f"unix:{kubelet.socket}") as channel:
            register = channel.unary_unary(
                f"/{SERVICE}/Register",
                request_serializer=pb.RegisterRequest.SerializeToString,
                response_deserializer=pb.Empty.FromString,
            )
            call = register.future(request)
            eventually(lambda: kubelet.registrations, "it is called")
            kubelet.stop()
            with pytest.raises(grpc.RpcError):
                call.result()

        def has_ended() -> bool:
            return not any(each.name.startswith(SERVICE) for each in threading.enumerate())

        eventually(has_ended, "no thread still dials", timeout=5)
