"""The kubelet's side of things: its socket, registering with it, and hearing that it is back.

Rules
- A kubelet that begins removes every socket of its directory, and then makes its own: so a socket
  of the kubelet's that is another than before means that everybody is to register anew.
- It calls a plugin back before it answers, which it may try for ten seconds.
- One that restarts asks for the devices of the pods that run before it admits new ones, and kills
  those whose plugin it does not know by then: half a second is late. So the socket of one that does
  not listen yet is tried again within hundredths of a second, each time anew: gRPC would wait.
- Which kubelet was reached is told by its socket, as it was before and after: a plugin that waited
  for the old one must not be registered with the new one by chance, and then once more.

Source: kubelet pkg/kubelet/cm/devicemanager/plugin/v1beta1.
"""

from __future__ import annotations

from typing import Any, Final

import anyio
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # likewise

from api.proto import deviceplugin_pb2 as pb
from integration.agent_errors import KubeletRefused, KubeletUnreachable
from integration.grpc_anyio import answer_of
from integration.kubelet.sockets import socket_identity

_REGISTER: Final = "/v1beta1.Registration/Register"
_TO_DIAL: Final = 5.0
_TO_ANSWER: Final = 15.0
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.2

# Each attempt stands for itself: none waits for what an earlier one has found.
_OPTIONS: Final = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))
_NO_ANSWER: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    }
)


async def register(kubelet: str, which: object, endpoint: str, resource: str) -> None:
    """Tell a kubelet of a plugin.

    Args:
        kubelet: the path of its socket.
        which: that socket's identity. No other one is told anything.
        endpoint: the name of the plugin's socket, in the same directory.

    Raises:
        KubeletRefused: the kubelet says no, and why.
        KubeletUnreachable: there is none that answers.
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
            found=f"nobody has answered for {_TO_DIAL:g} s",
            do="see whether the kubelet runs; it is tried again",
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
                raise KubeletUnreachable(asked, found=found, do="it is tried again") from error
            raise KubeletRefused(
                asked,
                found=f"the kubelet says: {found}",
                do="see whether this kubelet takes device plugins; it is tried again",
            ) from error


async def _dial(kubelet: str, which: object) -> Any:
    """A connection to a kubelet. Waits for one."""
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
    """Whether a channel comes to be connected at the first attempt."""
    state = channel.get_state(try_to_connect=True)
    while state in {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING}:
        await channel.wait_for_state_change(state)
        state = channel.get_state()
    return state is grpc.ChannelConnectivity.READY
