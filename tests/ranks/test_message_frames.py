"""Frames on a stream: what was written comes out again, and a stream that is cut tells of no half message."""

from __future__ import annotations

import io

import pytest

from pytest_torchcompile.ranks.message_frames import read_frame, write_frame


def stream_of(*frames: bytes) -> bytes:
    stream = io.BytesIO()
    for frame in frames:
        write_frame(stream, frame)
    return stream.getvalue()


def test_messages_come_out_as_they_were_written():
    """An empty one too, and one with what looks like a length in it."""
    frames = (b"", b"job", bytes(range(256)) * 300, b"\x03" + bytes(7))
    stream = io.BytesIO(stream_of(*frames))
    assert tuple(read_frame(stream) for _ in frames) == frames
    assert read_frame(stream) is None


@pytest.mark.parametrize("left", range(len(stream_of(b"job"))))
def test_a_stream_that_ends_in_a_message_has_ended(left):
    """Wherever the other side died."""
    stream = io.BytesIO(stream_of(b"first", b"job")[:len(stream_of(b"first")) + left])
    assert read_frame(stream) == b"first"
    assert read_frame(stream) is None


def test_each_message_is_sent_at_once():
    """The other side waits for it, and a buffer would keep it."""
    raw = io.BytesIO()
    stream = io.BufferedWriter(raw, buffer_size=1 << 16)
    write_frame(stream, b"job")
    assert raw.getvalue() == stream_of(b"job")
