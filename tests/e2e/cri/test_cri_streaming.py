"""Exec, attach and port-forward of the CRI, through the server's own streams."""

from __future__ import annotations

import pytest

from api.proto import cri_pb2 as pb
from integration.cri.errors import CriRefused
from tests.harness.pods import IDLE, Pods
from tests.harness.raising import raises
from tests.harness.waiting import eventually
from tools.cri.streaming import PortStream, ProcessStream
from tools.errors import StreamBroken, StreamRefused


def test_exec_streams_both_ways_and_tells_the_exit_code(pods: Pods) -> None:
    container = pods.run().start(*IDLE)
    script = "read line; echo got $line; echo err >&2; exit 5"
    with ProcessStream(container.exec_url("sh", "-c", script)) as stream:
        stream.write(b"a word\n")
        ended = stream.wait()
    assert (ended.exit_code, ended.stdout, ended.stderr) == (5, b"got a word\n", b"err\n")
    with ProcessStream(container.exec_url("seq", "1", "100000", stdin=False)) as stream:
        assert stream.wait().stdout == b"".join(b"%d\n" % n for n in range(1, 100001))
    with ProcessStream(container.exec_url("no-such-program")) as stream:
        ended = stream.wait()
    assert ended.exit_code == -1
    assert "no-such-program" in ended.message


def test_exec_on_a_terminal_can_be_typed_at_resized_and_interrupted(pods: Pods) -> None:
    container = pods.run().start(*IDLE)
    with ProcessStream(container.exec_url("sh", tty=True)) as stream:
        stream.resize(132, 43)
        # The size uses another channel, and may arrive after the input.
        stream.write(b"until stty size | grep '43 132'; do :; done; tty\n")
        assert b"43 132\r\n" in stream.read_until(b"/dev/pts/")
        stream.write(b"sleep 77\n")
        eventually(lambda: "sleep 77" in container.exec("ps").stdout, "it sleeps")
        stream.write(b"\x03")
        stream.write(b"echo code $?\n")
        stream.read_until(b"code 130\r\n")
        stream.write(b"exit 6\n")
        assert stream.wait().exit_code == 6


def test_attach_reads_and_writes_the_containers_own_stdio(pods: Pods) -> None:
    container = pods.run().start(
        "sh", "-c", "while read line; do echo got $line; done; echo end", stdin=True
    )
    with ProcessStream(container.attach_url()) as stream:
        stream.write(b"one\n")
        stream.read_until(b"got one\n")
    # A client that disconnects does not close the container's input.
    with ProcessStream(container.attach_url()) as stream:
        stream.write(b"two\n")
        stream.read_until(b"got two\n")
    assert container.state == "RUNNING"
    # containerd writes the log concurrently with what it sends, not before.
    eventually(lambda: container.output() == "got one\ngot two\n", "both are in the log")


def test_attached_client_goes_with_the_container(pods: Pods) -> None:
    container = pods.run().start("sh", "-c", "read line; exit 4", stdin=True, stdin_once=True)
    with ProcessStream(container.attach_url()) as stream:
        stream.write(b"go\n")
        assert stream.wait().message == ""
    assert container.exit_code() == 4


def test_attach_to_a_terminal(pods: Pods) -> None:
    container = pods.run().start("sh", stdin=True, tty=True)
    with ProcessStream(container.attach_url(tty=True)) as stream:
        stream.resize(90, 20)
        stream.write(b"until stty size | grep '20 90'; do :; done\n")
        stream.read_until(b"20 90\r\n")
        stream.write(b"exit 8\n")
        stream.wait()
    assert container.exit_code() == 8


def test_port_of_a_pod_is_forwarded(pods: Pods) -> None:
    pod = pods.run()
    container = pod.start("nc", "-ll", "-p", "8080", "-e", "cat")
    eventually(lambda: ":8080" in container.exec("netstat", "-ltn").stdout, "it listens")
    ports = pb.PortForwardRequest(pod_sandbox_id=pod.id, port=[8080])
    for _ in range(2):
        with PortStream(pods.cri.port_forward(ports).url, 8080) as stream:
            stream.write(b"a word\n" * 2000)
            seen = b""
            while len(seen) < 14000:
                seen += stream.read()
            assert seen == b"a word\n" * 2000
    nobody = pb.PortForwardRequest(pod_sandbox_id=pod.id, port=[9])
    with (
        PortStream(pods.cri.port_forward(nobody).url, 9) as stream,
        raises(StreamBroken, match="refused"),
    ):
        stream.read()


def test_url_is_good_for_one_stream_of_a_container_that_runs(pods: Pods) -> None:
    pod = pods.run()
    container = pod.start(*IDLE)
    url = container.exec_url("true")
    with ProcessStream(url) as stream:
        assert stream.wait().exit_code == 0
    with raises(StreamRefused, match="404"):
        ProcessStream(url)
    container.stop()
    with pytest.raises(CriRefused, match=r"CONTAINER_EXITED"):
        container.exec_url("true")
