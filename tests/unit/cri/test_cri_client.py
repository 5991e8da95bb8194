"""The CRI client, and the configuration of a server for it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from api.errors import Status
from api.proto import cri_pb2 as pb
from integration.cri.client import Cri
from integration.cri.errors import CriRefused, CriUnreachable
from tests.harness.raising import raises
from tools.cri import plugin as module
from tools.cri.plugin import CriPlugin, to_toml
from tools.errors import CniNotInstalled

HANDLERS = {"nvidia": {"runtime_type": "io.containerd.nvidia.v1", "options": {"Root": "/r"}}}


class _Server(grpc.GenericRpcHandler):  # type: ignore[misc] # it ships no types
    """Answers Version, and refuses everything else."""

    def service(self, call: Any) -> Any:
        def answer(_: bytes, context: Any) -> bytes:
            if call.method == "/runtime.v1.RuntimeService/Version":
                return pb.VersionResponse(runtime_name="fake").SerializeToString()
            context.abort(grpc.StatusCode.NOT_FOUND, f"no {call.method}")
            raise AssertionError

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def cri(tmp_path: Path) -> Iterator[Cri]:
    with ThreadPoolExecutor(1) as workers:
        server = grpc.server(workers, handlers=(_Server(),))
        server.add_insecure_port(f"unix://{tmp_path}/s")
        server.start()
        with Cri(f"{tmp_path}/s") as cri:
            yield cri
        server.stop(None).wait()


def test_call_has_a_typed_answer(cri: Cri) -> None:
    assert cri.version(pb.VersionRequest()).runtime_name == "fake"


def test_every_method_of_the_interface_is_called_by_its_name(cri: Cri) -> None:
    names = set()
    for service in ("RuntimeService", "ImageService"):
        for method in pb.DESCRIPTOR.services_by_name[service].methods:
            if method.name in {"Version", "GetContainerEvents"}:
                continue
            snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in method.name).lstrip("_")
            call = getattr(cri, snake)
            request = getattr(pb, method.input_type.name)()
            with pytest.raises(CriRefused) as refused:
                call(request)
            assert refused.value.said == f"no /runtime.v1.{service}/{method.name}"
            assert refused.value.status == Status.NOT_FOUND
            names.add(method.name)
    assert len(names) > 25


def test_nobody_there_is_another_error_than_a_refusal(tmp_path: Path) -> None:
    with Cri(f"{tmp_path}/none") as cri, raises(CriUnreachable):
        cri.version(pb.VersionRequest(), timeout=5)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("bridge", "host-local", "loopback"):
        (tmp_path / name).touch()
    monkeypatch.setattr(module, "_CNI_DIRECTORIES", ("/no/such", str(tmp_path)))
    return str(tmp_path)


def test_configuration_is_where_each_version_of_containerd_looks_for_it(plugins: str) -> None:
    cri = CriPlugin(HANDLERS, sandbox_image="pause:1")
    old = cri.tables(2, "/d")["io.containerd.grpc.v1.cri"]
    assert old["containerd"]["runtimes"] == HANDLERS
    assert (old["sandbox_image"], old["cni"]["bin_dir"]) == ("pause:1", plugins)
    new = cri.tables(3, "/d")
    assert new["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"] == HANDLERS
    assert new["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == "pause:1"
    assert "containerd" not in new["io.containerd.grpc.v1.cri"]


def test_missing_network_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CNI_DIRECTORIES", ("/no/such",))
    with raises(CniNotInstalled, match="Install the package containernetworking-plugins"):
        CriPlugin(HANDLERS, sandbox_image="pause:1").tables(2, "/d")


def test_toml_says_what_the_table_says(plugins: str) -> None:
    tables = CriPlugin(HANDLERS, sandbox_image='a "b" \\c').tables(2, "/d")
    text = to_toml(tables, "plugins")
    assert tomllib.loads(text) == {"plugins": tables}
