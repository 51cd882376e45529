"""The channel between workers and driver, over real sockets."""

import socket
import threading
from queue import SimpleQueue

import pytest

from dl_on_spark.launch.driver_channel import ChannelServer
from dl_on_spark.launch.worker_channel import WorkerChannel, report_once


@pytest.fixture
def inbox():
    return SimpleQueue()


@pytest.fixture
def server(inbox):
    with ChannelServer(b"secret", inbox, bind_host="127.0.0.1") as server:
        yield server


def connect(address, *, secret=b"secret", rank=0, deadline_s=60.0, on_stop=lambda: None, on_hang=print):
    return WorkerChannel(
        address, secret, rank=rank, host="here", deadline_s=deadline_s, on_stop=on_stop, on_hang=on_hang
    )


def next_of(inbox, *kinds):
    """The next message of these kinds."""
    while True:
        message = inbox.get(timeout=10)
        if message.kind in kinds:
            return message


def test_messages_arrive_in_order_with_their_rank_and_end_with_a_good_bye(server, inbox):
    channel = connect(server.address, rank=5)
    fields = {"logs": {"loss": 1.0}}
    for step in range(100):
        channel.send("progress", step=step, **fields)
        fields["logs"]["loss"] = -1.0 - step
    channel.close()
    assert next_of(inbox, "hello").fields["host"] == "here"
    heard = [next_of(inbox, "progress") for _ in range(100)]
    assert [message.fields["step"] for message in heard] == list(range(100))
    assert heard[0].fields["logs"] == {"loss": 1.0}  # as it was when it was sent
    assert {message.rank for message in heard} == {5}
    assert next_of(inbox, "bye", "lost").kind == "bye"


def test_heartbeats_carry_the_last_step(server, inbox):
    channel = connect(server.address)
    channel.progress(41)
    while next_of(inbox, "heartbeat").fields["step"] != 41:
        pass
    channel.close()


def test_sending_never_raises_or_waits_without_a_driver():
    channel = connect("127.0.0.1:1")
    loop = {}
    loop["self"] = loop
    for step in range(20_000):  # over the queue's limit
        channel.send("progress", step=step)
    channel.send("odd", step=None, kind_of="x", value=loop)
    assert channel.step == 19_999
    channel.close(timeout_s=1.0)


def test_no_progress_without_a_driver_is_reported_with_the_stack():
    stacks = SimpleQueue()
    channel = connect("127.0.0.1:1", deadline_s=0.5, on_hang=stacks.put)
    assert "test_no_progress_without_a_driver" in stacks.get(timeout=10)
    channel.close(timeout_s=1.0)


def test_the_driver_stops_a_worker_and_asks_where_it_is(server, inbox):
    stopped = threading.Event()
    channel = connect(server.address, rank=2, on_stop=stopped.set)
    next_of(inbox, "hello")
    assert server.send(2, "where")
    assert "test_the_driver_stops_a_worker" in next_of(inbox, "stack").fields["stack"]
    assert server.send(2, "stop")
    assert stopped.wait(10)
    assert not server.send(3, "stop")
    channel.close()


def test_a_worker_of_another_run_is_not_heard(server, inbox):
    stranger = connect(server.address, secret=b"other")
    stranger.send("progress", step=1)
    stranger.close(timeout_s=1.0)
    assert not report_once(server.address, b"other", 0, {"kind": "failed"})
    assert report_once(server.address, b"secret", 0, {"kind": "failed", "cause": 1})
    assert inbox.get(timeout=10).kind == "failed"
    assert inbox.empty()


def test_noise_and_silence_on_the_port_do_not_disturb_the_others(server, inbox):
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as noisy, socket.create_connection((host, int(port))):
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
        channel = connect(server.address)
        channel.send("log", text="still here")
        assert next_of(inbox, "log").fields == {"text": "still here"}
        channel.close()


def test_a_lost_connection_is_told_and_a_worker_comes_back_without_repeating_itself(inbox):
    class Flaky(ChannelServer):
        """Cuts a worker's connection on demand, as a network does."""

        def cut(self, rank):
            with self._lock:
                self._links[rank].shutdown(socket.SHUT_RDWR)

    with Flaky(b"secret", inbox, bind_host="127.0.0.1") as server:
        channel = connect(server.address)
        channel.send("log", text="first")
        assert next_of(inbox, "log").fields["text"] == "first"
        server.cut(0)
        assert next_of(inbox, "lost").rank == 0
        for number in range(5):
            channel.send("log", text=str(number))
        next_of(inbox, "hello")
        heard = [next_of(inbox, "log").fields["text"] for _ in range(4)]
        assert heard == sorted(set(heard))  # in order, none twice
        assert heard[-1] == "4" or next_of(inbox, "log").fields["text"] == "4"
        channel.close()


def test_a_frame_without_end_from_a_worker_ends_its_connection_only(server, inbox):
    channel = connect(server.address, rank=0)
    next_of(inbox, "hello")
    channel._write(b"\xff" * 8)
    assert next_of(inbox, "lost").rank == 0
    assert report_once(server.address, b"secret", 1, {"kind": "log", "text": "fine"})
    assert next_of(inbox, "log").rank == 1
    channel.close()
