"""A kubelet's DRA manager as a driver sees it, with real gRPC over unix sockets.

    with KubeletDra(root) as kubelet:
        driver = kubelet.wait_for("gpu.example.com")
        answer = driver.prepare(("default", uid, "claim"))

It watches the registration directory, calls GetInfo on a new socket, takes the first version in the
plugin's order that it supports, confirms the registration, opens the health stream, and has the
timeouts of a real kubelet. If a driver has several instances, it calls the newest connected one. It
keeps no record of claims, except what a test asks it to write (:mod:`.kubelet_root`).

Source: tests/recorded/kubernetes-1.36/dra; kubelet pkg/kubelet/pluginmanager, cm/dra/plugin.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from typing import Any, Final, Self

import grpc  # type: ignore[import-untyped] # it ships no types

from api.proto import dra_health_pb2 as health
from api.proto import dra_pb2 as pb
from api.proto import pluginregistration_pb2 as registration
from tests.harness.waiting import eventually

__all__ = ["Driver", "KubeletDra"]

_KNOWN: Final = {
    "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1",
    "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1",
}
_GET_INFO, _NOTIFY, _CALL = 1.0, 5.0, 45.0
_POLL: Final = 0.02

Reference = tuple[str, str, str]
"""Namespace, UID and name of a claim."""


class Driver:
    """The kubelet's client of a registered driver.

    Args:
        version: the API version to use, one of :data:`_KNOWN`.
    """

    def __init__(self, info: registration.PluginInfo, version: str) -> None:
        self.info = info
        self.version = version
        self.health: dict[str, health.DeviceHealth] = {}
        """The last health report of each device, by name."""
        self.told = 0
        """The number of health reports."""
        self.is_connected = True
        """Whether the health stream is open; it ends with the connection."""
        self._channel = grpc.insecure_channel(f"unix:{info.endpoint}")
        watch = self._channel.unary_stream(
            "/v1alpha1.DRAResourceHealth/NodeWatchResources",
            request_serializer=health.NodeWatchResourcesRequest.SerializeToString,
            response_deserializer=health.NodeWatchResourcesResponse.FromString,
        )
        self._stream = watch(health.NodeWatchResourcesRequest())
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(grpc.RpcError):
            for told in self._stream:
                self.health = {each.device.device_name: each for each in told.devices}
                self.told += 1
        self.is_connected = False

    def _call(self, method: str, request: Any, answer: Any, patience: float = _CALL) -> Any:
        call = self._channel.unary_unary(
            f"/{_KNOWN[self.version]}.DRAPlugin/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call(request, timeout=patience)

    def prepare(
        self, *claims: Reference, patience: float = _CALL
    ) -> dict[str, pb.NodePrepareResourceResponse]:
        """Prepare claims; return the answers by UID. Every claim has one."""
        request = pb.NodePrepareResourcesRequest(claims=map(_claim, claims))
        kind = pb.NodePrepareResourcesResponse
        answer = self._call("NodePrepareResources", request, kind, patience)
        assert set(answer.claims) == {uid for _, uid, _ in claims}
        return dict(answer.claims)

    def unprepare(self, *claims: Reference, patience: float = _CALL) -> dict[str, str]:
        """Unprepare claims; return the errors by UID. Every claim has one, which may be empty."""
        request = pb.NodeUnprepareResourcesRequest(claims=map(_claim, claims))
        kind = pb.NodeUnprepareResourcesResponse
        answer = self._call("NodeUnprepareResources", request, kind, patience)
        assert set(answer.claims) == {uid for _, uid, _ in claims}
        return {uid: each.error for uid, each in answer.claims.items()}

    def close(self) -> None:
        self._stream.cancel()
        self._channel.close()


class KubeletDra:
    """A kubelet. It runs while the context is open.

    Args:
        known: the API versions that it supports.
    """

    def __init__(self, root: str, known: tuple[str, ...] = tuple(_KNOWN)) -> None:
        self.root = root
        self._instances: list[Driver] = []
        self._known = known
        self._registry = os.path.join(root, "plugins_registry")
        self._sockets: dict[str, tuple[object, Driver | None]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        os.makedirs(self._registry, exist_ok=True)
        os.makedirs(os.path.join(self.root, "plugins"), exist_ok=True)
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for driver in self._instances:
            driver.close()
        self._instances.clear()
        self._sockets.clear()

    def restart(self) -> None:
        """Restart: scan the plugin directory, and call plugins only to register them."""
        self.__exit__()
        self.__enter__()

    @property
    def drivers(self) -> dict[str, Driver]:
        """Return the newest connected instance of each driver, by the driver's name."""
        found: dict[str, Driver] = {}
        for driver in list(self._instances):
            before = found.get(driver.info.name)
            if before is None or driver.is_connected or not before.is_connected:
                found[driver.info.name] = driver
        return found

    def instances(self, name: str) -> list[Driver]:
        """Return all instances of a driver, the oldest first."""
        return [each for each in list(self._instances) if each.info.name == name]

    def wait_for(self, name: str) -> Driver:
        """Wait until a driver is registered."""

        def registered() -> list[Driver]:
            return [driver for each, driver in self.drivers.items() if each == name]

        return eventually(registered, f"{name} registers")[0]

    def _watch(self) -> None:
        while not self._stop.wait(_POLL):
            there = {}
            for entry in os.listdir(self._registry):
                path = os.path.join(self._registry, entry)
                with suppress(OSError):
                    seen = os.stat(path)
                    if not entry.startswith(".") and stat.S_ISSOCK(seen.st_mode):
                        there[path] = (seen.st_ino, seen.st_ctime_ns)
            for path, (identity, driver) in list(self._sockets.items()):
                if there.get(path) != identity:
                    del self._sockets[path]
                    if driver is not None:
                        self._instances.remove(driver)
                        driver.close()
            for path, identity in there.items():
                if path not in self._sockets:
                    with suppress(grpc.RpcError):  # it is retried
                        self._sockets[path] = (identity, self._register(path))

    def _register(self, path: str) -> Driver | None:
        with grpc.insecure_channel(f"unix:{path}") as channel:

            def call(method: str, request: Any, answer: Any, timeout: float) -> Any:
                ask = channel.unary_unary(
                    f"/pluginregistration.Registration/{method}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=answer.FromString,
                )
                return ask(request, timeout=timeout)

            info = call("GetInfo", registration.InfoRequest(), registration.PluginInfo, _GET_INFO)
            versions = [each for each in info.supported_versions if each in self._known]
            taken = {each.info.endpoint for each in self.instances(info.name)}
            is_fit = info.type == "DRAPlugin" and bool(versions) and info.endpoint not in taken
            error = "" if is_fit else "no version is known, or the endpoint is another's"
            status = registration.RegistrationStatus(plugin_registered=is_fit, error=error)
            call(
                "NotifyRegistrationStatus", status, registration.RegistrationStatusResponse, _NOTIFY
            )
            if not is_fit:
                return None
            driver = Driver(info, versions[0])
            self._instances.append(driver)
            return driver


def _claim(reference: Reference) -> pb.Claim:
    namespace, uid, name = reference
    return pb.Claim(namespace=namespace, uid=uid, name=name)
