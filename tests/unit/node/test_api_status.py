"""Who refuses a call, from the messages of a real server and of others."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.apiserver.status import Refusal, parse_status, remedy_of
from tests.harness.recorded import recorded_lines

RECORDED: Final = recorded_lines("dra/refusals.jsonl")
# In these cases the server finds the object invalid; in others it does not.
WRONG: Final = {
    "129 devices": "spec.devices: Too many: 129",
    "17 taints": "spec.devices[0].taints: Too many: 17",
    "string of 65": "spec.devices[0].attributes[a].string: Too long",
    "counters and devices": 'spec: Invalid value: "": only one of `sharedCounters` or `devices`',
    "9 counter sets": 'spec: Invalid value: "": only one of `sharedCounters` or `devices`',
    "consumes 3 sets": "spec.devices[0].consumesCounters: Too many: 3",
    "device twice": "spec.devices[1]: Duplicate value",
    "PUT with another driver": 'spec.driver: Invalid value: "other.example.com": field is immut',
}


@pytest.mark.parametrize("each", RECORDED, ids=lambda each: each["case"])
def test_a_policy_is_told_from_a_server_that_finds_something_wrong(each: dict[str, Any]) -> None:
    found = parse_status(each["status"], json.dumps(each["answer"]))
    message = each["answer"]["message"]
    assert found.message == message
    expected = ""
    for policy in ("containerd-shim-nvidia-dra", "containerd-shim-nvidia-node-condition"):
        if f"AdmissionPolicy '{policy}'" in message:
            expected = f"ValidatingAdmissionPolicy {policy}"
    assert found.denied_by == expected
    if each["case"] in WRONG:
        assert found.invalid[0].startswith(WRONG[each["case"]])
    else:
        assert found.invalid == ()
    remedy = remedy_of(each["status"], "/apis/resource.k8s.io/v1/resourceslices", found)
    if expected:
        assert expected in remedy
    elif each["status"] == 403:
        assert remedy == "", "the ClusterRole is the error's own"
    else:
        assert "ClusterRole" not in remedy
        assert remedy


@pytest.mark.parametrize(
    ("code", "path", "words"),
    [
        (404, "/api/v1/nodes/one", "--node-name"),
        (404, "/api/v1/nodes/one/status", "--node-name"),
        (404, "/apis/resource.k8s.io", "kubectl api-versions"),
        (404, "/api/v1/namespaces/gone/events", "that it exists"),
        (401, "/api/v1/nodes/one", "token or certificate"),
        (409, "/api/v1/nodes/one", "reads it again and retries"),
        (410, "/apis/resource.k8s.io/v1/resourceslices", "reads it again and retries"),
        (422, "/apis/resource.k8s.io/v1/resourceslices", "what refuses it"),
        (429, "/api/v1/nodes/one", "the agent retries"),
        (503, "/api/v1/nodes/one", "the agent retries"),
    ],
)
def test_what_helps_goes_by_what_was_asked(code: int, path: str, words: str) -> None:
    assert words in remedy_of(code, path, Refusal("it is so"))


@pytest.mark.parametrize(
    ("message", "denied_by"),
    [
        # If a policy's own expression fails, the message names no binding.
        ("\"a\" is forbidden: ValidatingAdmissionPolicy 'a.b' denied request: failed to configure",
         "ValidatingAdmissionPolicy a.b"),
        ('admission webhook "a.b" denied the request without explanation', "admission webhook a.b"),
        ('admission webhook "a.b" does not support dry run', "admission webhook a.b"),
        ('Internal error occurred: failed calling webhook "a.b": EOF', "webhook a.b"),
        ('ResourceSlice "x" is invalid: spec.driver: Invalid value: "webhook"', ""),
    ],
)  # fmt: skip
def test_a_denial_is_known_by_its_words_whatever_its_status(message: str, denied_by: str) -> None:
    # A webhook's answer may look like the server's own validation.
    causes = [{"reason": "FieldValueInvalid", "field": "spec.driver", "message": "no"}]
    status = {"message": message, "details": {"causes": causes}}
    for code in (400, 401, 403, 409, 422, 500):
        found = parse_status(code, json.dumps(status))
        assert found.denied_by == denied_by
        assert found.invalid == (() if denied_by or code != 422 else ("spec.driver: no",))


@pytest.mark.parametrize(
    ("header", "details", "seconds"),
    [
        ("", None, 0.0),
        ("7", None, 7.0),
        ("", {"retryAfterSeconds": 3}, 3.0),
        ("7", {"retryAfterSeconds": 3}, 7.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None, 0.0),
        ("-1", {"retryAfterSeconds": "soon"}, 0.0),
        ("", ["retryAfterSeconds"], 0.0),
    ],
)
def test_how_long_to_wait_is_in_a_header_or_in_the_status(
    header: str, details: Any, seconds: float
) -> None:
    status = {"message": "busy", "details": details}
    assert parse_status(429, json.dumps(status), header).retry_after == seconds
    assert parse_status(429, b"busy", header).retry_after == (7.0 if header == "7" else 0.0)


@given(
    st.sampled_from([400, 403, 422, 500]),
    st.one_of(
        st.binary(max_size=40),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["message", "details", "causes", "field", "reason"]), inner
                )
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
    ),
)
def test_whatever_answers_is_read(code: int, said: bytes) -> None:
    found = parse_status(code, said)
    assert found.message.isprintable()
    assert all(each.isprintable() for each in found.invalid)
    assert code == 422 or not found.invalid
