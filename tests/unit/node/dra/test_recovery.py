"""Recovering claims that only the kubelet has recorded, with retries at the API server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from api.errors import NvshimError
from integration import backoff
from integration.agent_errors import (
    ApiServerRefused,
    ApiServerSilent,
    KubeconfigUnusable,
    ResourceClaimUnusable,
)
from integration.node.services.dra.recovery import recall
from integration.node.values.claims import Claim, ClaimDevice, Sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.anyio

DEVICE: Final = ClaimDevice("gpu", "node-1", "gpu-1", "GPU-1", "GPU-1")
CLAIMS: Final = tuple(Claim(uid, "default", uid, (DEVICE,)) for uid in ("plain", "mps"))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 0.001)


def shared(claim: Claim, device: str = DEVICE.device) -> Claim:
    given = replace(DEVICE, device=device, sharing=Sharing(daemon="claims/x"))
    return replace(claim, devices=(given,))


class Server:
    """Answers with errors in turn, and then with its objects."""

    def __init__(self, errors: Sequence[NvshimError]) -> None:
        self._errors = list(errors)
        self.asked: list[str] = []
        self.said: list[str] = []

    async def read(self, claim: Claim) -> Claim:
        self.asked.append(claim.uid)
        if self._errors:
            raise self._errors.pop(0)
        return shared(claim)

    def fault(self, _concern: str, line: str) -> None:
        self.said.append(line)


def refused(http: int) -> ApiServerRefused:
    error = ApiServerRefused("to GET", found="no")
    error.http = http
    return error


@pytest.mark.parametrize(
    "error",
    [ApiServerSilent("to GET", found="x"), refused(503), refused(401),
     KubeconfigUnusable("x", found="y")],
    ids=["silent", "unavailable", "unauthenticated", "kubeconfig"],
)  # fmt: skip
async def test_a_server_that_says_nothing_is_waited_for_by_clients_of_daemons(
    error: NvshimError,
) -> None:
    server = Server([error] * 3)
    found = await recall(CLAIMS, server.read, lambda claim: claim.uid == "mps", server.fault)
    assert server.asked == ["mps"] * 4 + ["plain"]
    assert found == {claim.uid: shared(claim) for claim in CLAIMS}
    assert all("default/mps shares its devices is not known" in line for line in server.said[:3])
    assert server.said[3:] == [""]


async def test_nobody_else_waits_for_it() -> None:
    server = Server([ApiServerSilent("to GET", found="x")] * 9)
    assert await recall(CLAIMS, server.read, lambda _: False, server.fault) == {}
    assert server.asked == ["plain"]
    assert server.said == [""]


@pytest.mark.parametrize(
    "error", [ResourceClaimUnusable("x", found="does not exist"), refused(403)], ids=["gone", "403"]
)
async def test_what_it_says_of_a_claim_is_an_answer(error: NvshimError) -> None:
    server = Server([error])
    found = await recall(CLAIMS, server.read, lambda claim: claim.uid == "mps", server.fault)
    assert server.asked == ["mps", "plain"]
    assert found.keys() == {"plain"}


async def test_a_claim_that_was_allocated_anew_is_as_the_kubelet_says() -> None:
    async def read(claim: Claim) -> Claim:
        return shared(claim, "gpu-2")

    assert await recall(CLAIMS, read, lambda _: True, lambda *_: None) == {}
