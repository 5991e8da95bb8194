"""The client of the API server: calls, refusals, and watches that end or are ended."""

from __future__ import annotations

import ssl
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.node.api_server import ApiServer, trusted
from integration.node.errors import ApiServerRefused, ApiServerSilent
from tests.harness.cluster import Cluster
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(str(tmp_path / "account"), node="node-1") as cluster:
        yield cluster


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
    # From what was heard last nothing is missed.
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
    trust = trusted(f"{client.service_account}/ca.crt")
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
    with pytest.raises(ApiServerSilent, match="no object"):
        client.call("GET", SLICES)
    monkeypatch.setattr(cluster, "answer", lambda _: (200, iter(["no change"])))
    with pytest.raises(ApiServerSilent):
        client.watch(SLICES, "1", {}).next()
    monkeypatch.setattr(cluster, "answer", lambda _: (503, ["no message"]))
    with pytest.raises(ApiServerRefused, match="no reason is given"):
        client.call("GET", SLICES)
