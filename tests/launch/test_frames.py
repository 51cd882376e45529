"""Frames and the handshake: what goes in comes out, and strangers stay outside."""

import io
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.launch.frames import FrameError, derive, encode, greet_driver, greet_worker, read_frame

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.text(max_size=5), values, max_size=3), max_size=3), st.integers(1, 7))
def test_messages_survive_any_split_of_the_stream(messages, piece):
    stream = io.BytesIO(b"".join(encode(message) for message in messages))
    heard = []
    while (message := read_frame(lambda size: stream.read(min(size, piece)))) is not None:
        heard.append(message)
    assert heard == messages


@given(st.dictionaries(st.text(), st.integers(), min_size=1), st.data())
def test_a_cut_frame_is_an_error_and_not_an_end(message, data):
    whole = encode(message)
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    with pytest.raises(FrameError, match="ended after"):
        read_frame(io.BytesIO(cut).read)


@given(st.binary(min_size=4))
def test_random_bytes_never_become_more_than_an_error(noise):
    try:
        message = read_frame(io.BytesIO(noise).read, limit=1024)
    except FrameError:
        return
    assert isinstance(message, dict)


def test_a_frame_over_the_limit_is_refused_before_its_body_is_read():
    stream = io.BytesIO(b"\xff\xff\xff\xff" + b"x" * 10)
    with pytest.raises(FrameError, match="over the limit"):
        read_frame(stream.read, limit=1024)
    assert stream.tell() == 4
    with pytest.raises(FrameError, match="over the limit"):
        encode({"text": "x" * 2000}, limit=1024)


def test_numpy_values_travel_as_numbers_and_lists():
    frame = encode({"loss": np.float32(0.5), "steps": np.int64(3), "row": np.arange(3)})
    assert read_frame(io.BytesIO(frame).read) == {"loss": 0.5, "steps": 3, "row": [0, 1, 2]}


def test_what_json_cannot_say_is_a_frame_error():
    loop = {}
    loop["self"] = loop
    with pytest.raises(FrameError, match="not JSON"):
        encode(loop)


def meet(driver_secret, worker_secret):
    """Both sides of a handshake; (the identity the driver saw or its error, the worker's error)."""
    ours, theirs = socket.socketpair()
    errors = []

    def worker():
        try:
            greet_driver(theirs, worker_secret, {"rank": 3, "role": "worker"})
        except (FrameError, OSError) as error:
            errors.append(error)
            theirs.close()

    thread = threading.Thread(target=worker)
    thread.start()
    with ours, theirs:
        ours.settimeout(5)
        theirs.settimeout(5)
        try:
            seen = greet_worker(ours, driver_secret)
        except (FrameError, OSError) as error:
            seen = error
        thread.join(10)
    return seen, errors


def test_both_sides_of_one_run_accept_each_other():
    seen, errors = meet(b"secret", b"secret")
    assert seen == {"rank": 3, "role": "worker"}
    assert errors == []


def test_a_worker_refuses_a_driver_of_another_run_and_the_driver_refuses_it():
    seen, errors = meet(b"one", b"other")
    assert isinstance(seen, FrameError)
    assert "the driver does not know the secret" in str(errors[0])


def test_a_stranger_who_skips_the_check_is_refused_by_the_driver():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.sendall(encode({"identity": {"rank": 0}, "nonce": "n"}) + encode({"proof": "0" * 64}))
        with pytest.raises(FrameError, match="the worker does not know the secret"):
            greet_worker(ours, b"secret")


def test_keys_of_different_purposes_differ():
    assert derive(b"secret", "collectives") != derive(b"secret", "channel")
    assert derive(b"secret", "collectives") == derive(b"secret", "collectives")
