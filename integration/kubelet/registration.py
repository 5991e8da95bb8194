"""Register device plugins with the kubelet.

Rules
- A kubelet that starts removes every socket in its directory before it creates its own. So if the
  kubelet's socket is new, every plugin has to register again.
- The kubelet calls the plugin back before it answers, and may keep trying for ten seconds.
- After a restart, a kubelet asks for the devices of running pods before it admits new ones. It
  kills pods whose plugin has not registered by then, and half a second may be too late. So the
  agent tries to connect every few hundredths of a second, each time on a new channel, since gRPC
  would wait.
- The socket's identity before and after connecting shows which kubelet was reached. A plugin that
  was waiting for the old kubelet must not register with the new one by chance, and then once more.

Source: kubelet pkg/kubelet/cm/devicemanager/plugin/v1beta1.
"""

from __future__ import annotations

from typing import Any, Final

import anyio
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # the same

from api.proto import deviceplugin_pb2 as pb
from integration.agent_errors import KubeletRefused, KubeletUnreachable
from integration.grpc_anyio import answer_of
from integration.kubelet.sockets import socket_identity

_REGISTER: Final = "/v1beta1.Registration/Register"
_TO_DIAL: Final = 5.0
_TO_ANSWER: Final = 15.0
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.2

# Share no subchannel: an attempt must not wait for the backoff of an earlier one.
_OPTIONS: Final = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))
_NO_ANSWER: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    }
)


async def register(kubelet: str, which: object, endpoint: str, resource: str) -> None:
    """Register a plugin with a kubelet.

    Args:
        kubelet: the path of the kubelet's socket.
        which: the identity of that socket; no other kubelet is called.
        endpoint: the name of the plugin's socket, in the same directory.

    Raises:
        KubeletRefused: the kubelet refuses.
        KubeletUnreachable: no kubelet answers.
    """
    asked = f"to register {resource} with the kubelet at {kubelet}"
    request = pb.RegisterRequest(
        version="v1beta1",
        endpoint=endpoint,
        resource_name=resource,
        options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
    )
    try:
        with anyio.fail_after(_TO_DIAL):
            channel = await _dial(kubelet, which)
    except TimeoutError as error:
        raise KubeletUnreachable(
            asked,
            found=f"no answer within {_TO_DIAL:g} s",
            do="check that the kubelet runs; the agent retries",
        ) from error
    async with channel:
        call: Any = channel.unary_unary(
            _REGISTER,
            request_serializer=pb.RegisterRequest.SerializeToString,
            response_deserializer=pb.Empty.FromString,
        )
        try:
            await answer_of(call(request, timeout=_TO_ANSWER))
        except grpc.aio.AioRpcError as error:
            found = error.details() or error.code().name
            if error.code() in _NO_ANSWER:
                raise KubeletUnreachable(asked, found=found, do="the agent retries") from error
            raise KubeletRefused(
                asked,
                found=f"the kubelet says: {found}",
                do="check that this kubelet accepts device plugins; the agent retries",
            ) from error


async def _dial(kubelet: str, which: object) -> Any:
    """Return a connection to the kubelet; wait until it accepts one."""
    pause = _FIRST_PAUSE
    while True:
        channel = grpc.aio.insecure_channel(f"unix:{kubelet}", options=_OPTIONS)
        try:
            if await _connects(channel) and socket_identity(kubelet) == which:
                return channel
        except BaseException:
            with anyio.CancelScope(shield=True):
                await channel.close()
            raise
        await channel.close()
        await anyio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _connects(channel: Any) -> bool:
    """Return whether a channel connects at the first attempt."""
    state = channel.get_state(try_to_connect=True)
    while state in {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING}:
        await channel.wait_for_state_change(state)
        state = channel.get_state()
    return state is grpc.ChannelConnectivity.READY
