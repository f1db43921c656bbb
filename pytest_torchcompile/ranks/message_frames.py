"""Frames: messages of known length on a stream of bytes, as pipes to a fresh process carry them; and what speaks in
messages with a rank process, whatever carries them. No torch.
"""

from __future__ import annotations

import struct
from typing import IO, Any, Final, Protocol

__all__ = ["Channel", "Messages", "read_frame", "write_frame"]

_LENGTH: Final = struct.Struct("<Q")


class Messages(Protocol):
    """What is said to the other side, and what it says: the part of ``multiprocessing``'s connections that both ends
    of a rank process use.
    """

    def send(self, message: Any, /) -> None:
        """Raises OSError where nobody hears it any more."""

    def recv(self) -> Any:
        """Raises EOFError where nothing can come any more."""


class Channel(Messages, Protocol):
    """Pytest's end."""

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Whether there is a message, or the end, within so many seconds."""

    def close(self) -> None:
        """Say that nothing will come any more."""


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Write one message. Raises OSError where nobody reads any more."""
    stream.write(_LENGTH.pack(len(frame)))
    stream.write(frame)
    # The other end waits for the whole frame, and would wait for a buffer here.
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next message; None where the stream has ended, also in the middle of one."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    frame = stream.read(length)
    if len(frame) < length:
        return None
    return frame
