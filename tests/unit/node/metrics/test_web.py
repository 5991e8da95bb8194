"""TLS and passwords: the file decides, also after a change, and other clients are refused."""

from __future__ import annotations

import base64
import functools
import os
import ssl
import threading
from contextlib import asynccontextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import bcrypt
import pytest
import yaml

from integration.agent_errors import WebConfigInvalid
from integration.node.services.metrics import web
from integration.node.services.metrics.address import Address
from integration.node.services.metrics.server import Response, addresses_of, listen, serve
from integration.node.services.metrics.web import Web, parse, read
from tests.harness.api_server import CERTIFICATE, KEY
from tests.harness.prometheus import Programs, Promtool
from tests.harness.raising import raises

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from integration.node.services.metrics.server import Request

pytestmark = pytest.mark.anyio

HASH: Final = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
TLS: Final = {"cert_file": "tls.crt", "key_file": "tls.key"}
VERIFIED: Final = TLS | {
    "client_ca_file": "tls.crt", "client_auth_type": "RequireAndVerifyClientCert",
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tls.crt").write_text(CERTIFICATE)
    (tmp_path / "tls.key").write_text(KEY)
    return tmp_path


def write(directory: Path, document: Any) -> str:
    """Write the file by a rename, as Kubernetes does."""
    (directory / "new").write_text(yaml.safe_dump(document))
    os.replace(directory / "new", directory / "web.yml")
    return str(directory / "web.yml")


WRONG: Final = [
    ("a list", []),
    ("an unknown section", {"tls": {}}),
    ("an unknown key", {"tls_server_config": TLS | {"certfile": "x"}}),
    ("no key", {"tls_server_config": {"cert_file": "tls.crt"}}),
    ("a missing file", {"tls_server_config": TLS | {"cert_file": "other"}}),
    ("a wrong type", {"tls_server_config": TLS | {"cert_file": 3}}),
    ("a wrong version", {"tls_server_config": TLS | {"min_version": "TLS9"}}),
    ("an unknown kind of check", {"tls_server_config": VERIFIED | {"client_auth_type": "x"}}),
    ("an unneeded CA", {"tls_server_config": TLS | {"client_ca_file": "tls.crt"}}),
    ("an unknown header", {"http_server_config": {"headers": {"X-Other": "1"}}}),
    ("a hash that no password has", {"basic_auth_users": {"me": f"$2b$99${'x' * 53}"}}),
    ("a wrong header", {"http_server_config": {"headers": {"X-Frame-Options": "maybe"}}}),
]  # fmt: skip
# We refuse it, whether promtool does or not.
UNSUPPORTED: Final = [
    ("TLS without a certificate, which is none", {"tls_server_config": {}}),
    ("a rate limit", {"rate_limit": {"interval": "1s"}}),
    ("no version", {"tls_server_config": TLS | {"min_version": "TLS13", "max_version": "TLS12"}}),
    ("cipher suites", {"tls_server_config": TLS | {"cipher_suites": []}}),
    ("names without a check", {"tls_server_config": TLS | {"client_allowed_sans": ["a"]}}),
    ("an unused CA", {"tls_server_config": TLS | {"client_auth_type": "RequireAnyClientCert"}}),
    ("a header of two lines",
     {"http_server_config": {"headers": {"X-XSS-Protection": "1\r\nA: b"}}}),
    ("a password that is no hash", {"basic_auth_users": {"me": "s3cr3t"}}),
]  # fmt: skip
RIGHT: Final = [
    ("nothing", None),
    ("TLS", {"tls_server_config": TLS | {"min_version": "TLS13", "max_version": "TLS13"}}),
    ("checked clients", {"tls_server_config": VERIFIED}),
    ("users", {"basic_auth_users": {"me": HASH, "you": HASH}}),
    ("headers", {"http_server_config": {"http2": False, "headers": {"X-Frame-Options": "deny"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "document"), [*WRONG, *UNSUPPORTED], ids=str)
def test_a_wrong_file_is_refused_and_no_password_is_repeated(
    directory: Path, what: str, document: Any
) -> None:
    with raises(WebConfigInvalid) as raised:
        read(write(directory, document))
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize("text", ["{", "a: [", "\0", "&a [*a]", "!!bool x", '!!int ""'])
def test_a_file_that_is_no_yaml_is_refused(directory: Path, text: str) -> None:
    (directory / "web.yml").write_text(text)
    with raises(WebConfigInvalid):
        read(str(directory / "web.yml"))


def test_a_file_that_is_missing_is_named_once(directory: Path) -> None:
    nowhere = str(directory / "nowhere.yml")
    named = write(directory, {"tls_server_config": TLS | {"cert_file": "other"}})
    for path, missing in ((nowhere, nowhere), (named, str(directory / "other"))):
        with raises(WebConfigInvalid) as raised:
            read(path)
        assert raised.value.found == f"{missing}: no such file or directory"


@pytest.mark.parametrize("name", ["web.yml", "tls.crt", "tls.key"])
def test_a_pipe_is_no_file_and_is_not_waited_for(directory: Path, name: str) -> None:
    path = write(directory, {"tls_server_config": TLS})
    os.unlink(directory / name)
    os.mkfifo(directory / name)
    with raises(WebConfigInvalid, match="not a file"):
        read(path)


@pytest.mark.parametrize("prefers", [True, False])
def test_whose_order_of_cipher_suites_counts(directory: Path, prefers: bool) -> None:
    tls = read(
        write(directory, {"tls_server_config": TLS | {"prefer_server_cipher_suites": prefers}})
    ).tls
    assert tls is not None
    assert bool(tls.options & ssl.OP_CIPHER_SERVER_PREFERENCE) is prefers


def test_promtool_thinks_the_same_of_each_file(directory: Path) -> None:
    promtool = Promtool(Programs.of_debian())
    for expected, table in ((False, WRONG), (True, RIGHT)):
        for what, document in table:
            accepted, said = promtool("check", "web-config", write(directory, document))
            assert accepted == expected, (what, said)
    for _, document in RIGHT:
        parse(document)


# -- connections -------------------------------------------------------------------------------


async def hello(_: Request) -> Response:
    return Response(HTTPStatus.OK, b"hello\n")


@asynccontextmanager
async def served(path: str, faults: list[str]) -> AsyncIterator[int]:
    listener = await listen(Address("127.0.0.1", 0))
    web = Web(path, hello, faults.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(functools.partial(serve, listener, web.answer, lambda _: None, web.wrap))
        yield int(addresses_of(listener)[0].rpartition(":")[2])
        tasks.cancel_scope.cancel()


async def get(
    port: int, user: str | None = None, password: str = "", tls: ssl.SSLContext | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request; return the status, headers and content of the answer."""

    def exchange() -> tuple[int, dict[str, str], bytes]:
        host = "127.0.0.1"
        client = HTTPSConnection(host, port, context=tls) if tls else HTTPConnection(host, port)
        client.timeout = 20
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        client.request("GET", "/", headers={"Authorization": f"Basic {token}"} if user else {})
        answer = client.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        client.close()
        return found

    return await anyio.to_thread.run_sync(exchange)


def client(directory: Path, *, with_certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(directory / "tls.crt"))
    if with_certificate:
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    return context


async def test_only_the_right_password_gets_in(directory: Path) -> None:
    headers = {"X-Frame-Options": "deny", "X-Content-Type-Options": "nosniff"}
    document = {
        "basic_auth_users": {"me": HASH},
        "http_server_config": {"headers": headers},
    }
    async with served(write(directory, document), []) as port:
        for _ in range(2):
            status, got, content = await get(port, "me", "secret")
            assert (status, content) == (200, b"hello\n")
            assert got.items() >= headers.items()
        for user, password in (
            (None, ""), ("me", "wrong"), ("me", ""), ("you", "secret"), ("", "secret"),
            ("me", "x" * 100), ("me:secret", ""), ("me", "secret\0"),
        ):  # fmt: skip
            status, got, content = await get(port, user, password)
            assert (status, got["WWW-Authenticate"]) == (401, "Basic"), (user, password)
            assert content == b"Unauthorized\n"


async def test_a_password_counts_as_far_as_in_other_exporters(directory: Path) -> None:
    # htpasswd hashes it, and Prometheus accepts it: bcrypt ignores what follows 72 bytes.
    password = "a word " * 12
    hashed = bcrypt.hashpw(password.encode()[:72], bcrypt.gensalt(4)).decode()
    async with served(write(directory, {"basic_auth_users": {"me": hashed}}), []) as port:
        assert (await get(port, "me", password))[0] == 200
        assert (await get(port, "me", password[:71]))[0] == 401


async def test_a_password_is_compared_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bytes] = []
    check = bcrypt.checkpw

    def counted(password: bytes, hashed: bytes) -> bool:
        compared.append(password)
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", counted)
    async with served(write(directory, {"basic_auth_users": {"me": HASH}}), []) as port:
        for _ in range(3):
            assert (await get(port, "me", "secret"))[0] == 200
            assert (await get(port, "you", "secret"))[0] == 401
    # An unknown user takes the same time as a wrong password.
    assert len(compared) == 1 + 3


async def test_a_user_who_is_removed_has_no_access_by_the_same_hash_of_another(
    directory: Path,
) -> None:
    path = write(directory, {"basic_auth_users": {"me": HASH, "you": HASH}})
    async with served(path, []) as port:
        assert (await get(port, "you", "secret"))[0] == 200
        write(directory, {"basic_auth_users": {"me": HASH}})
        assert (await get(port, "you", "secret"))[0] == 401
        assert (await get(port, "me", "secret"))[0] == 200


async def test_a_change_counts_at_once_and_a_wrong_file_lets_nobody_in(directory: Path) -> None:
    other = bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode()
    faults: list[str] = []
    path = write(directory, {"basic_auth_users": {"me": HASH}})
    async with served(path, faults) as port:
        assert (await get(port, "me", "secret"))[0] == 200
        write(directory, {"basic_auth_users": {"me": other}})
        assert (await get(port, "me", "secret"))[0] == 401
        assert (await get(port, "me", "other"))[0] == 200
        assert not any(faults)
        write(directory, {"basic_auth_users": {"me": "nonsense"}})
        with pytest.raises(OSError):  # noqa: PT011 - http.client has several for a closed connection
            await get(port, "me", "other")
        assert "NVSHIM-E2787" in faults[-1]
        write(directory, {"tls_server_config": TLS})
        assert (await get(port, tls=client(directory)))[0] == 200
        assert faults[-1] == ""
        os.unlink(path)
        with pytest.raises(OSError):  # noqa: PT011
            await get(port, tls=client(directory))


async def test_a_certificate_that_is_replaced_counts_once_its_key_is(directory: Path) -> None:
    faults: list[str] = []
    path = write(directory, {"tls_server_config": TLS})
    key = directory / "tls.key"
    async with served(path, faults) as port:
        assert (await get(port, tls=client(directory)))[0] == 200
        key.write_text("half of it")
        with pytest.raises(OSError):  # noqa: PT011
            await get(port, tls=client(directory))
        assert "its certificate or key" in faults[-1]
        key.write_text(KEY)
        assert (await get(port, tls=client(directory)))[0] == 200
        assert faults[-1] == ""


async def test_who_does_not_speak_tls_or_has_no_certificate_is_not_answered(
    directory: Path,
) -> None:
    path = write(directory, {"tls_server_config": VERIFIED})
    async with served(path, []) as port:
        assert (await get(port, tls=client(directory, with_certificate=True)))[0] == 200
        for tls in (None, client(directory)):
            with pytest.raises(OSError):  # noqa: PT011
                await get(port, tls=tls)
        for names, is_one in ((["127.0.0.1"], True), (["elsewhere"], False)):
            allowed = VERIFIED | {"client_allowed_sans": names}
            write(directory, {"tls_server_config": allowed})
            tls = client(directory, with_certificate=True)
            if is_one:
                assert (await get(port, tls=tls))[0] == 200
            else:
                with pytest.raises(OSError):  # noqa: PT011
                    await get(port, tls=tls)


async def test_versions_of_tls_are_those_of_the_file(directory: Path) -> None:
    only_new = TLS | {"min_version": "TLS13"}
    async with served(write(directory, {"tls_server_config": only_new}), []) as port:
        old = client(directory)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):  # noqa: PT011
            await get(port, tls=old)
        assert (await get(port, tls=client(directory)))[0] == 200


async def test_while_the_file_hangs_connections_are_closed_and_the_server_can_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, faults = threading.Event(), list[str]()
    monkeypatch.setattr(web, "LONGEST", 0.01)
    async with served(write(directory, {"basic_auth_users": {"me": HASH}}), faults) as port:
        monkeypatch.setattr(Web, "_current", lambda _: goes_on.wait(60))
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await get(port, "me", "secret")
    goes_on.set()
    assert [*map(is_silent, faults)] == [True, True]


def is_silent(fault: str) -> bool:
    return "web.yml: its file system does not answer" in fault
