"""The API server client: calls, refusals, and watches that end or are closed."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import threading
import time
from http.client import IncompleteRead
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from integration.agent_errors import ApiServerRefused, ApiServerSilent, KubeconfigUnusable
from integration.apiserver import connection
from integration.apiserver.client import ApiServer
from integration.apiserver.connection import trusted
from integration.apiserver.credentials import of_kubeconfig, of_pod
from tests.harness.cluster import Cluster
from tests.harness.front import Front
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.http_server import Request

SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(str(tmp_path / "account"), node="node-1") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def closed_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every client: an exception refers to it, and garbage is closed in any order."""
    made, init = list[ApiServer](), ApiServer.__init__

    def remember(self: ApiServer, *args: Any, **options: Any) -> None:
        made.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(ApiServer, "__init__", remember)
    yield
    for each in made:
        each.close()


@pytest.fixture
def client(cluster: Cluster) -> ApiServer:
    return ApiServer("127.0.0.1", cluster.port, cluster.service_account)


def a_slice(name: str, driver: str = "a.example.com") -> dict[str, Any]:
    pool = {"name": "node-1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": "node-1", "pool": pool}
    return {"kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}


def test_objects_are_made_found_and_removed(client: ApiServer) -> None:
    made = client.call("POST", SLICES, a_slice("one"))
    assert made["metadata"]["generation"] == 1
    found = client.call("GET", SLICES, query={"fieldSelector": "spec.driver=a.example.com"})
    assert found["items"] == [made]
    client.call("DELETE", f"{SLICES}/one", {"preconditions": {"uid": made["metadata"]["uid"]}})
    assert client.call("GET", SLICES)["items"] == []


def test_each_call_has_the_token_of_that_moment(client: ApiServer, cluster: Cluster) -> None:
    client.call("GET", SLICES)
    cluster.rotate("second")
    client.call("GET", SLICES)
    cluster.token = "third"
    with pytest.raises(ApiServerRefused, match="401") as refused:
        client.call("GET", SLICES)
    assert refused.value.http == 401


def test_refusals_are_told_apart(client: ApiServer) -> None:
    made = client.call("POST", SLICES, a_slice("one"))
    bad = a_slice("two")
    bad["spec"]["pool"]["resourceSliceCount"] = 0
    old = {**made, "metadata": {**made["metadata"], "resourceVersion": "1"}}
    for method, path, body, code in (
        ("PUT", f"{SLICES}/none", made, 404),
        ("PUT", f"{SLICES}/one", old, 409),
        ("POST", SLICES, a_slice("one"), 409),
        ("POST", SLICES, bad, 422),
        ("GET", "/apis/resource.k8s.io/v9/resourceslices", None, 404),
    ):
        with pytest.raises(ApiServerRefused) as refused:
            client.call(method, path, body)
        assert refused.value.http == code
        assert str(refused.value).startswith("NVSHIM-E2771 api-server-refused: cannot ")


def test_changes_are_heard_in_order_until_the_server_ends_the_watch(
    client: ApiServer, cluster: Cluster
) -> None:
    since = client.call("GET", SLICES)["metadata"]["resourceVersion"]
    watch = client.watch(SLICES, since, {"fieldSelector": "spec.driver=a.example.com"})
    client.call("POST", SLICES, a_slice("other", "b.example.com"))
    made = client.call("POST", SLICES, a_slice("one"))
    assert watch.next() == ("ADDED", made)
    cluster.wipe()
    kind, found = watch.next() or ("", {})
    assert (kind, found["metadata"]["name"]) == ("DELETED", "one")
    cluster.close_watches()
    assert list(watch) == []
    # A watch from the last resource version misses nothing.
    client.call("POST", SLICES, a_slice("two"))
    again = client.watch(SLICES, found["metadata"]["resourceVersion"], {})
    assert (again.next() or ("", {}))[1]["metadata"]["name"] == "two"
    again.close()


def test_a_version_that_is_too_old_is_a_refusal(client: ApiServer, cluster: Cluster) -> None:
    client.call("POST", SLICES, a_slice("one"))
    cluster.forget()
    with pytest.raises(ApiServerRefused, match="too old resource version") as refused:
        client.watch(SLICES, "1", {}).next()
    assert refused.value.http == 410
    cluster.refuse = lambda *_: 410
    with pytest.raises(ApiServerRefused) as refused:
        client.watch(SLICES, "1", {})
    assert refused.value.http == 410


@pytest.mark.parametrize(
    "end",
    [b'{"type": "MODI', ConnectionResetError("reset"), IncompleteRead(b"")],
    ids=["in a line", "reset", "in a chunk"],
)
def test_a_watch_whose_connection_is_cut_has_ended(
    client: ApiServer, monkeypatch: pytest.MonkeyPatch, end: bytes | Exception
) -> None:
    """Load balancers cut idle connections, and a server that restarts cuts all."""

    def readline(_: int) -> bytes:
        if isinstance(end, Exception):
            raise end
        return end

    watch = client.watch(SLICES, "100", {})
    monkeypatch.setattr(watch._answer, "readline", readline)
    assert watch.next() is None


def test_a_watch_that_is_closed_ends_for_the_thread_that_waits_in_it(
    client: ApiServer, cluster: Cluster
) -> None:
    watch = client.watch(SLICES, "100", {})
    ended: list[object] = []

    def read() -> None:
        try:
            ended.append(watch.next())
        except ApiServerSilent as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: cluster.watches, "the watch is open")
    watch.close()
    thread.join(10)
    assert len(ended) == 1
    watch.close()


def test_an_authority_may_lack_what_only_newer_pythons_ask_for(
    client: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ssl.create_default_context

    def strict(**given: Any) -> ssl.SSLContext:
        context = make(**given)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    trust = trusted(of_pod(client.host, client.port, client.service_account))
    assert trust.verify_mode == ssl.CERT_REQUIRED
    assert trust.check_hostname
    assert not trust.verify_flags & ssl.VERIFY_X509_STRICT
    assert client.call("GET", SLICES)["items"] == []


def test_a_server_that_is_not_there_is_silent(client: ApiServer, tmp_path: Path) -> None:
    gone = ApiServer("127.0.0.1", 1, client.service_account)
    with pytest.raises(ApiServerSilent, match=r"127\.0\.0\.1:1 can be reached"):
        gone.call("GET", SLICES)
    with pytest.raises(ApiServerSilent):
        gone.watch(SLICES, "1", {})
    with pytest.raises(ApiServerSilent, match="No such file"):
        ApiServer("127.0.0.1", 1, str(tmp_path)).call("GET", SLICES)


def test_an_answer_that_is_none_is_silence(
    cluster: Cluster, client: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "answer", lambda _: (200, ["a list"]))
    with pytest.raises(ApiServerSilent, match="not an object"):
        client.call("GET", SLICES)
    monkeypatch.setattr(cluster, "answer", lambda _: (200, iter(["no change"])))
    with pytest.raises(ApiServerSilent):
        client.watch(SLICES, "1", {}).next()
    monkeypatch.setattr(cluster, "answer", lambda _: (503, ["no message"]))
    with pytest.raises(ApiServerRefused, match="no reason given"):
        client.call("GET", SLICES)


def test_a_connection_is_kept_for_what_is_asked_next(client: ApiServer, cluster: Cluster) -> None:
    for token in ("second", "third", "fourth"):
        client.call("GET", SLICES)
        cluster.rotate(token)
    client.call("GET", SLICES)
    assert cluster.connections == 1
    client.call("POST", SLICES, a_slice("one"))
    assert cluster.connections == 2, "what changes something must not be asked twice"
    client.call("GET", SLICES)
    client.call("GET", SLICES)
    assert cluster.connections == 2


def test_a_connection_that_ended_or_leads_nowhere_is_made_anew(
    client: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.call("GET", SLICES)
    cluster.drop_connection()
    assert client.call("GET", SLICES)["items"] == []
    assert cluster.connections == 2
    # Like a load balancer without a backend: it accepts data, but does not answer. It loses one
    # while nobody asks.
    answer, waits = cluster.answer, threading.Event()
    heard: list[int] = []

    def silent(request: Request) -> tuple[int, Any]:
        heard.append(cluster.connections)
        if cluster.connections == 2:
            waits.wait(60)
        return answer(request)

    monkeypatch.setattr(cluster, "answer", silent)
    kept = client._kept
    kept._idle = [(since - connection._IDLE, each) for since, each in kept._idle]
    assert client.call("GET", SLICES)["items"] == []
    assert heard == [3]
    waits.set()


def test_a_slow_server_gets_a_request_once(
    client: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, looked = list[str](), threading.Event()
    answer, look = cluster.answer, connection._unacknowledged

    def slow(request: Request) -> tuple[int, Any]:
        heard.append(request.path)
        assert looked.wait(60)
        return answer(request)

    def unacknowledged(plain: socket.socket) -> int:
        looked.set()
        return look(plain)

    client.call("GET", SLICES)
    monkeypatch.setattr(connection, "_FOR_ACKNOWLEDGEMENT", 0.2)
    monkeypatch.setattr(connection, "_unacknowledged", unacknowledged)
    monkeypatch.setattr(cluster, "answer", slow)
    assert client.call("GET", SLICES)["items"] == []
    assert len(heard) == 1
    assert cluster.connections == 1


def test_a_peer_that_acknowledges_nothing_is_given_up_soon(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_FOR_ACKNOWLEDGEMENT", 0.2)
    with Front(cluster.port) as front:
        client = ApiServer("127.0.0.1", front.port, cluster.service_account)
        client.call("GET", SLICES)
        front.vanish()
        assert client.call("GET", SLICES)["items"] == []
        assert front.accepted == 2


def test_after_a_request_without_an_answer_no_kept_connection_is_used(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, waits = ApiServer("127.0.0.1", cluster.port, cluster.service_account), threading.Event()
    client.call("GET", SLICES)
    kept, access = client._kept, of_pod(client.host, client.port, client.service_account)
    other = connection.Connection(access, kept.trust(access))
    kept._idle.insert(0, (time.monotonic(), other))
    answer = cluster.answer

    def silent(request: Request) -> tuple[int, Any]:
        waits.wait(60)
        return answer(request)

    monkeypatch.setattr(cluster, "answer", silent)
    monkeypatch.setattr(connection._Socket, "settimeout", lambda *_: late())
    with pytest.raises(ApiServerSilent):
        client.call("GET", SLICES)
    assert kept._idle == []
    waits.set()


def late() -> None:
    raise TimeoutError("it takes too long")


def test_a_server_that_sends_a_little_now_and_then_is_not_waited_for_longer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ApiServer("127.0.0.1", cluster.port, cluster.service_account, timeout=0.5)
    monkeypatch.setattr("integration.apiserver.client._WATCH_LASTS", 0)
    told, over = list[int](), threading.Event()

    def trickle() -> Iterator[Any]:
        while len(told) < 200 and not over.wait(0.05):
            told.append(1)
            yield {"type": "MODIFIED", "object": {}}

    monkeypatch.setattr(cluster, "answer", lambda _: (200, trickle()))
    try:
        with pytest.raises(ApiServerSilent, match=r"takes too long|timed out"):
            client.call("GET", SLICES)
        with pytest.raises(ApiServerSilent, match=r"takes too long|timed out"):
            list(client.watch(SLICES, "100", {}))
    finally:
        over.set()


def test_each_address_of_a_name_has_its_part_of_the_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = socket.getaddrinfo("127.0.0.1", cluster.port, type=socket.SOCK_STREAM)
    with Front(cluster.port) as front:
        front.be("drop")
        silent = socket.getaddrinfo("127.0.0.1", front.port, type=socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*silent, *found])
        client = ApiServer("127.0.0.1", cluster.port, cluster.service_account, timeout=2)
        assert client.call("GET", SLICES)["items"] == []
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: silent * 8)
        begun = time.monotonic()
        with pytest.raises(ApiServerSilent):
            client.call("POST", SLICES, a_slice("one"))
        assert time.monotonic() - begun < 4 * client.timeout


def test_the_kernel_tries_connections_that_are_silent(client: ApiServer, cluster: Cluster) -> None:
    watch = client.watch(SLICES, "100", {})
    eventually(lambda: cluster.watches, "the watch is open")
    with open("/proc/net/tcp", encoding="ascii") as file:
        lines = [line.split() for line in file]
    (timer,) = [words[5] for words in lines if words[2].endswith(f":{cluster.port:04X}")
                and words[3] == "01"]  # fmt: skip
    assert timer.startswith("02:"), "the timer is that of its probes"
    watch.close()


def test_another_authority_is_trusted_from_then_on(client: ApiServer, cluster: Cluster) -> None:
    client.call("GET", SLICES)
    path = f"{cluster.service_account}/ca.crt"
    with open(path, encoding="ascii") as file:
        ours = file.read()
    other = ssl.create_default_context().get_ca_certs(binary_form=True)[0]
    with open(path, "w", encoding="ascii") as file:
        file.write(ssl.DER_cert_to_PEM_cert(other))
    with pytest.raises(ApiServerSilent, match="certificate verify failed"):
        client.call("GET", SLICES)
    with open(path, "a", encoding="ascii") as file:
        file.write(ours)  # as during the rotation of a CA
    assert client.call("GET", SLICES)["items"] == []


def test_a_refusal_says_what_helps_and_when_to_ask_again(
    client: ApiServer, cluster: Cluster
) -> None:
    for code, words in ((401, "token or certificate"), (403, "ClusterRole"), (429, "agent retries"),
                        (502, "agent retries")):  # fmt: skip
        cluster.refuse = lambda *_, code=code: code
        with pytest.raises(ApiServerRefused, match=words):
            client.call("GET", SLICES)


def test_a_server_may_have_an_address_of_ipv6(tmp_path: Path) -> None:
    with Cluster(str(tmp_path / "account"), node="node-1", host="::1") as cluster:
        for host in ("::1", "[::1]"):
            client = ApiServer(host, cluster.port, cluster.service_account)
            assert client.call("GET", SLICES)["items"] == []
    with pytest.raises(ApiServerSilent, match=rf"\[::1\]:{client.port} can be reached"):
        ApiServer("::1", client.port, client.service_account).call("GET", SLICES)


def kubeconfig(path: Path, server: str, cluster: Any, user: Any) -> str:
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "node",
        "contexts": [{"name": "node", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "other", "cluster": {}},
                     {"name": "here", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "me", "user": user}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.mark.parametrize("how", ["files", "data"])
def test_a_kubelets_kubeconfig_has_a_certificate(tmp_path: Path, how: str) -> None:
    with Cluster(str(tmp_path / "account"), node="node-1", by_certificate=True) as cluster:
        both = Path(cluster.certificate).read_bytes()
        authority = Path(f"{cluster.service_account}/ca.crt").read_bytes()
        if how == "files":
            os.rename(cluster.certificate, tmp_path / "both.pem")
            here = {"certificate-authority": "account/ca.crt"}
            me = {"client-certificate": "both.pem", "client-key": str(tmp_path / "both.pem")}
        else:
            here = {"certificate-authority-data": base64.b64encode(authority).decode()}
            data = base64.b64encode(both).decode()
            me = {"client-certificate-data": data, "client-key-data": data}
        path = kubeconfig(tmp_path / "config", f"https://127.0.0.1:{cluster.port}", here, me)
        client = ApiServer("", 0, "", path)
        assert client.call("GET", SLICES)["items"] == []
        kubeconfig(tmp_path / "config", f"https://127.0.0.1:{cluster.port}", here, {})
        with pytest.raises(ApiServerSilent, match=r"the server of .*/config can be reached"):
            client.call("GET", SLICES)
        os.unlink(tmp_path / "config")
        with pytest.raises(ApiServerSilent, match="No such file"):
            client.call("GET", SLICES)


def test_a_kubeconfig_may_have_a_token_and_the_name_of_a_certificate(
    tmp_path: Path, cluster: Cluster
) -> None:
    here = {
        "certificate-authority": "account/ca.crt", "tls-server-name": "api-server",
        "insecure-skip-tls-verify": False,
    }  # fmt: skip
    server = f"https://127.0.0.1:{cluster.port}"
    for me in ({"token": cluster.token}, {"tokenFile": "account/token", "token": "old"}):
        path = kubeconfig(tmp_path / "config", server, here, me)
        assert ApiServer("", 0, "", path).call("GET", SLICES)["items"] == []
    kubeconfig(tmp_path / "config", server, {**here, "tls-server-name": "another"}, me)
    with pytest.raises(ApiServerSilent, match="another"):
        ApiServer("", 0, "", path).call("GET", SLICES)


@pytest.mark.parametrize(
    ("server", "cluster", "user", "words"),
    [
        ("http://one:8080", {}, {}, "its server is http://one:8080"),
        ("https://one/rancher", {}, {}, "its server is https://one/rancher"),
        ("https://one:port", {}, {}, "Port could not be cast"),
        ("https://one", {"insecure-skip-tls-verify": True}, {}, "insecure-skip-tls-verify"),
        ("https://one", {"proxy-url": "http://two"}, {}, "proxy-url of its cluster"),
        ("https://one", {}, {"exec": {"command": "aws"}}, "exec of its user is not supported"),
        ("https://one", {}, {"client-key-data": "?"}, "missing or wrong"),
        ("https://one", {"certificate-authority": "none"}, {}, "No such file"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_a_kubeconfig_that_is_not_to_be_used_is_refused(
    tmp_path: Path, server: str, cluster: Any, user: Any, words: str
) -> None:
    path = kubeconfig(tmp_path / "config", server, cluster, user)
    with pytest.raises(KubeconfigUnusable, match=words):
        of_kubeconfig(path)


@pytest.mark.parametrize("text", ["", "a: [", "current-context: one", "contexts: 3", "[]"])
def test_what_is_no_kubeconfig_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(KubeconfigUnusable, match="NVSHIM-E2795"):
        of_kubeconfig(str(tmp_path / "config"))
