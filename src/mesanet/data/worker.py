"""A worker process of a preparation: blocks come in on stdin, tokens go out on stdout, until stdin ends.

It is a plain child process rather than one of multiprocessing's, because it then ends by itself, at the end of its
stdin, whenever and however its parent dies.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import traceback
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from mesanet.data.documents import Block, Documents, Reading, token_type, tokenise
from mesanet.data.tokenizer import Tokenizer, load_tokenizer

_SIZES = struct.Struct("<QQ")

Message = tuple[dict[str, Any], bytes | bytearray]


def send(stream: BinaryIO, header: dict[str, Any], *parts: bytes | memoryview) -> None:
    """Write one message: a header of plain JSON data, and bytes."""
    head = json.dumps(header).encode()
    stream.write(_SIZES.pack(len(head), sum(memoryview(part).nbytes for part in parts)) + head)
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: BinaryIO) -> Message | None:
    """Read one message; None where the other side has gone."""
    sizes = stream.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    head_size, body_size = _SIZES.unpack(sizes)
    head = stream.read(head_size)
    body = bytearray(body_size)
    filled = 0
    with memoryview(body) as view:
        while filled < body_size:
            count = stream.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                return None
            filled += count
    return (json.loads(head), body) if len(head) == head_size else None


def block_message(block: Block) -> tuple[dict[str, Any], bytes | memoryview]:
    """Return a block as a message; where to read on and how far we are stay with the sender."""
    header = {"kind": block.kind, "origin": block.origin, "first": block.first, "sizes": block.sizes}
    return header, block.payload


def documents_of(message: Message, vocabulary: int) -> Documents:
    """Read the documents out of a worker's answer."""
    header, body = message
    count = header["count"]
    table = np.frombuffer(body, dtype="<i8", count=3 * count).reshape(3, count)
    tokens = np.frombuffer(body, dtype=token_type(vocabulary), offset=table.nbytes)
    return Documents(table[0], table[1], table[2].view(np.uint64), tokens)


def settings_message(tokenizer: str, bos_token: str | None, reading: Reading) -> dict[str, Any]:
    """Return the first message of all, from which a worker builds what it needs."""
    return {"tokenizer": tokenizer, "bos_token": bos_token, "reading": asdict(reading)}


def main() -> None:
    """Serve blocks until stdin ends."""
    # Ctrl-C reaches every process of the terminal; the parent alone decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # Whatever a library prints must not end up between the messages.
    sys.stdout = sys.stderr
    first = receive(source)
    if first is None:
        return
    settings = first[0]
    reading = Reading(**settings["reading"])
    tokenizer: Tokenizer | None = None
    while (message := receive(source)) is not None:
        try:
            tokenizer = tokenizer or load_tokenizer(settings["tokenizer"], settings["bos_token"])
            block = Block(payload=message[1], position=None, **message[0])  # type: ignore[arg-type]
            answer = tokenise(block, tokenizer, reading)
        except ValueError as error:
            send(sink, {"mistake": str(error)})
        except Exception:  # noqa: BLE001 - whatever it is, the parent has to hear of it and shows it whole
            send(sink, {"failure": traceback.format_exc()})
        else:
            table = np.stack([answer.lengths, answer.sizes, answer.hashes.view(np.int64)]).astype("<i8")
            send(sink, {"count": len(answer)}, table.tobytes(), answer.tokens.tobytes())


if __name__ == "__main__":
    main()
