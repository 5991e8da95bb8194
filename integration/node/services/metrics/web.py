"""TLS and passwords for the metrics, from the web configuration file of Prometheus' exporters.

Rules
- An unknown key is an error, and so is an unsupported one: certificates within the file, cipher
  suites, curves, a rate limit, and client certificates that are not verified.
- The file, and the files that it names, are read again when they change. While one of them is
  invalid, connections are closed without an answer.
- Passwords are compared in a thread, one at a time, and an unknown user takes as long as a known
  one. A correct password is remembered as a digest, since bcrypt is slow by design.

bcrypt (0.7 MB) is imported only if the file has users.

Source: prometheus/exporter-toolkit, docs/web-configuration.md.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import ssl
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import anyio
import yaml
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSAttribute, TLSStream

from hooks.schema import BOOLEAN, Kind, WrongValue, choice, like, list_of, need, one_of, text
from integration.agent_errors import WebConfigInvalid
from integration.detached import SlowCall, run_detached
from integration.node.file_calls import LONGEST
from integration.node.services.metrics.server import Request, Response

_VERSION: Final = choice(
    {
        "TLS10": ssl.TLSVersion.TLSv1, "TLS11": ssl.TLSVersion.TLSv1_1,
        "TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3,
    }
)  # fmt: skip
_TLS: Final[Mapping[str, Kind]] = {
    "cert_file": text(),
    "key_file": text(),
    "client_ca_file": text(),
    "client_auth_type": choice(
        {
            "NoClientCert": ssl.CERT_NONE, "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
            "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
        }
    ),
    "client_allowed_sans": list_of(text(), "a list of names"),
    "min_version": _VERSION,
    "max_version": _VERSION,
    "prefer_server_cipher_suites": BOOLEAN,
}  # fmt: skip
_HEADERS: Final[Mapping[str, Kind]] = {
    "Content-Security-Policy": like("[ -~]*", "a text in ASCII"),
    "X-Frame-Options": one_of("deny", "sameorigin"),
    "X-Content-Type-Options": one_of("nosniff"),
    "X-XSS-Protection": like("[ -~]*", "a text in ASCII"),
    "Strict-Transport-Security": like("[ -~]*", "a text in ASCII"),
}
_HASH: Final = like(
    r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}", "a hash by bcrypt of cost 4 to 31"
)
_ALWAYS_SENT: Final = "X-Content-Type-Options"

_FILES: Final = frozenset({"cert_file", "key_file", "client_ca_file"})
_MOST_OF_PASSWORD: Final = 72  # bytes
_MOST_REMEMBERED: Final = 64


@dataclass(frozen=True, slots=True)
class WebConfig:
    """A web configuration file."""

    tls: Mapping[str, Any] = field(default_factory=dict)  # by the keys of _TLS; empty for no TLS
    headers: tuple[tuple[str, str], ...] = ()  # of each answer
    users: Mapping[str, bytes] = field(default_factory=dict)  # the hash of each password


def _table(value: Any) -> dict[str, Any]:
    need(isinstance(value, dict) and all(isinstance(key, str) for key in value))
    return dict(value)


_TABLE: Final = Kind(_table, "a mapping")
_HTTP: Final[Mapping[str, Kind]] = {"http2": BOOLEAN, "headers": _TABLE}
_SECTIONS: Final = dict.fromkeys(
    ("tls_server_config", "http_server_config", "basic_auth_users"), _TABLE
)


def parse(document: Any) -> WebConfig:
    """Parse the content of a web configuration file.

    Raises:
        WebConfigInvalid: a key is unknown or not supported, or a value is wrong.
    """
    sections = _checked({} if document is None else document, "it", _SECTIONS)
    tls = _checked(sections.get("tls_server_config", {}), "tls_server_config", _TLS)
    http = _checked(sections.get("http_server_config", {}), "http_server_config", _HTTP)
    headers = _checked(http.get("headers", {}), "headers", _HEADERS)
    users = sections.get("basic_auth_users", {})
    hashes = _checked(users, "basic_auth_users", dict.fromkeys(users, _HASH))
    if "tls_server_config" in sections and not {"cert_file", "key_file"} <= tls.keys():
        raise _invalid("tls_server_config", "cert_file and key_file are needed")
    asks = tls.get("client_auth_type", ssl.CERT_NONE) != ssl.CERT_NONE
    if asks != ("client_ca_file" in tls) or (not asks and "client_allowed_sans" in tls):
        raise _invalid("tls_server_config", "client_auth_type and client_ca_file need each other")
    return WebConfig(
        tls,
        tuple((name, value) for name, value in headers.items() if name != _ALWAYS_SENT),
        {name: hashed.encode() for name, hashed in hashes.items()},
    )


def _checked(document: Any, name: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return the values of a section, each of its kind."""
    table: dict[str, Any] = _check(document, name, _TABLE)
    for key in table:
        if key not in kinds:
            raise _invalid(name, f"the key {key} is unknown, or not supported here")
    return {key: _check(value, f"{name}.{key}", kinds[key]) for key, value in table.items()}


def _check(value: Any, name: str, kind: Kind) -> Any:
    try:
        return kind.check(value)
    except WrongValue as error:  # do not repeat the value: it may be a password
        raise _invalid(name, f"it is not {error.wanted_text}") from None


def _invalid(where: str, found: str) -> WebConfigInvalid:
    return WebConfigInvalid("the web configuration", found=f"{where}: {found}")


# -- files ------------------------------------------------------------------------------------


class Read(NamedTuple):
    """A web configuration file as it was read."""

    config: WebConfig
    tls: ssl.SSLContext | None  # None without TLS
    # the file and those that it names, as they were when read
    files: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def is_current(self) -> bool:
        """Whether no file has changed since."""
        try:
            return all(_identity(path) == before for path, before in self.files)
        except OSError:
            return False


def read(path: str) -> Read:
    """Read a web configuration file, and the files that it names.

    Raises:
        WebConfigInvalid: one of them is missing or invalid.
    """
    try:
        files = [(path, _identity(path))]
        with open(path, encoding="utf-8") as file:
            config = parse(yaml.safe_load(file))
        directory = os.path.dirname(os.path.abspath(path))
        named = {
            key: os.path.join(directory, config.tls[key]) for key in _FILES & config.tls.keys()
        }
        files += [(each, _identity(each)) for each in named.values()]
        tls = _context({**config.tls, **named}) if config.tls else None
        if config.users:
            import bcrypt  # noqa: F401, PLC0415 - takes memory
    except ssl.SSLError as error:  # an OSError without a path
        raise _invalid(path, f"its certificate or key: {error.reason or error}") from error
    except OSError as error:
        raise _invalid(error.filename or path, (error.strerror or str(error)).lower()) from error
    except (ValueError, yaml.YAMLError, RecursionError, ImportError) as error:
        raise _invalid(path, str(error)) from error
    except (LookupError, AttributeError) as error:  # PyYAML's, for a scalar with a wrong tag
        raise _invalid(path, "a value is not of the kind that its tag says") from error
    return Read(config, tls, tuple(files))


def _identity(path: str) -> tuple[int, ...]:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # opening a pipe may never end
        raise FileExistsError(errno.EEXIST, "is not a file", path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _context(tls: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Otherwise OpenSSL asks for the password of an encrypted key on the terminal.
    context.load_cert_chain(tls["cert_file"], tls["key_file"], password=lambda: b"")
    context.minimum_version = tls.get("min_version", ssl.TLSVersion.TLSv1_2)
    context.maximum_version = tls.get("max_version", ssl.TLSVersion.TLSv1_3)
    if context.minimum_version > context.maximum_version:
        raise ValueError("tls_server_config: min_version (TLS12 by default) exceeds max_version")
    context.verify_mode = tls.get("client_auth_type", ssl.CERT_NONE)
    if "client_ca_file" in tls:
        context.load_verify_locations(tls["client_ca_file"])
    if not tls.get("prefer_server_cipher_suites", True):  # the library's default
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


# -- the server --------------------------------------------------------------------------------


class Web:
    """Protects a server as its web configuration file says.

    Args:
        path: the file.
        answer: answers a request that is allowed.
        fault: receives what is wrong with the file; "" if nothing is wrong.

    Raises:
        WebConfigInvalid: a file is missing or invalid.
    """

    def __init__(
        self,
        path: str,
        answer: Callable[[Request], Awaitable[Response]],
        fault: Callable[[str], None],
    ) -> None:
        self._path, self._answer, self._fault = path, answer, fault
        self._read = read(path)
        self._right: set[bytes] = set()  # digests of passwords that were right
        self._one = anyio.Lock()
        self._reading = SlowCall()

    async def wrap(self, stream: SocketStream) -> ByteStream:
        """Start a connection, with TLS if the file enables it.

        Raises:
            anyio.BrokenResourceError: a file is invalid or hangs, or TLS fails.
        """
        try:
            found = await self._reading.run(self._current, LONGEST)
        except (WebConfigInvalid, TimeoutError) as error:
            silent = _invalid(self._path, "its file system does not answer")
            self._fault(str(silent if isinstance(error, TimeoutError) else error))
            raise anyio.BrokenResourceError from error
        self._fault("")
        self._read = found
        if found.tls is None:
            return stream
        wrapped = await TLSStream.wrap(
            stream, server_side=True, ssl_context=found.tls, standard_compatible=False
        )
        names = found.config.tls.get("client_allowed_sans", ())
        certificate: Any = wrapped.extra(TLSAttribute.peer_certificate, None) or {}  # noqa: S610
        if names and {name for _, name in certificate.get("subjectAltName", ())}.isdisjoint(names):
            raise anyio.BrokenResourceError
        return wrapped

    def _current(self) -> Read:
        return self._read if self._read.is_current else read(self._path)

    async def answer(self, request: Request) -> Response:
        """Answer a request if its password is right."""
        config = self._read.config
        if config.users and not await self._is_allowed(request.headers.get("authorization", "")):
            ask = (("WWW-Authenticate", "Basic"),)
            response = Response(HTTPStatus.UNAUTHORIZED, b"Unauthorized\n", headers=ask)
        else:
            response = await self._answer(request)
        return replace(response, headers=(*response.headers, *config.headers))

    async def _is_allowed(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        try:
            user, _, password = base64.b64decode(token, validate=True).decode().partition(":")
        except ValueError:
            return False
        users = self._read.config.users
        # For an unknown user compare with another user's hash, which takes as long.
        hashed = users.get(user) or next(iter(users.values()))
        parts = (user.encode(), hashed, password.encode())
        digest = hashlib.sha256(b"\0".join(parts)).digest()
        if scheme.lower() != "basic":
            return False
        if digest in self._right:
            return user in users
        async with self._one:
            is_right = await run_detached(_is_right, password.encode(), hashed)
        if is_right and user in users:
            if len(self._right) == _MOST_REMEMBERED:
                self._right.clear()
            self._right.add(digest)
        return is_right and user in users


def _is_right(password: bytes, hashed: bytes) -> bool:
    import bcrypt  # noqa: PLC0415 - takes memory

    try:
        # Go's bcrypt, and so Prometheus' exporters, ignores the rest of a password, too.
        return bcrypt.checkpw(password[:_MOST_OF_PASSWORD], hashed)
    except ValueError:  # a salt that bcrypt does not write
        return False
