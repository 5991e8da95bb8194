"""Our messages decode the recorded calls between a real kubelet and a driver."""

from __future__ import annotations

from typing import Any, Final

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from api.proto import dra_health_pb2 as health
from api.proto import dra_pb2 as dra
from api.proto import pluginregistration_pb2 as registration
from tests.harness.recorded import recorded_lines

V1: Final = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
MESSAGES: Final[dict[tuple[str, str], Any]] = {
    ("request", "GetInfo"): registration.InfoRequest,
    ("answer", "GetInfo"): registration.PluginInfo,
    ("request", "NotifyRegistrationStatus"): registration.RegistrationStatus,
    ("answer", "NotifyRegistrationStatus"): registration.RegistrationStatusResponse,
    ("request", "NodePrepareResources"): dra.NodePrepareResourcesRequest,
    ("answer", "NodePrepareResources"): dra.NodePrepareResourcesResponse,
    ("request", "NodeUnprepareResources"): dra.NodeUnprepareResourcesRequest,
    ("answer", "NodeUnprepareResources"): dra.NodeUnprepareResourcesResponse,
    ("stream message", "NodeWatchResources"): health.NodeWatchResourcesResponse,
}
RECORDED: Final = recorded_lines("dra/messages.jsonl")


def test_every_kind_of_message_was_recorded() -> None:
    found = {(each["what"], each["method"].rpartition("/")[2]) for each in RECORDED}
    assert found == set(MESSAGES)


@pytest.mark.parametrize("each", RECORDED, ids=lambda each: f"{each['what']} {each['method']}")
def test_a_message_is_read_whole_and_written_as_it_was(each: dict[str, Any]) -> None:
    message = MESSAGES[each["what"], each["method"].rpartition("/")[2]]()
    ParseDict(each["message"], message)
    again = type(message).FromString(message.SerializeToString())
    assert MessageToDict(again, preserving_proto_field_name=True) == each["message"]


def test_both_versions_of_the_driver_have_one_form_on_the_wire() -> None:
    by_version = {
        each["method"].rpartition("/")[0]: {*each["message"]["claims"][0]}
        for each in RECORDED
        if each["what"] == "request" and each["method"].endswith("/NodePrepareResources")
    }
    fields = {"namespace", "uid", "name"}
    assert by_version == {V1: fields, V1.replace("v1", "v1beta1"): fields}
