"""Blocks through worker processes and back, in their order."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from typing import Any

from mesanet.data.documents import MEBIBYTE, Block, Documents, Reading, tokenise
from mesanet.data.tokenizer import Tokenizer
from mesanet.data.worker import Message, block_message, documents_of, receive, send, settings_message
from mesanet.errors import UserError

# Blocks that wait at each worker beside the one that it works on, so that it never waits for the reading.
AHEAD = 1
# A block is a mebibyte, but one long document can be six, and takes many times that while it is tokenised. So many
# bytes are under way at most, with many workers this much for each of them: the longest documents go one at a time.
BYTES_UNDER_WAY = 6 * MEBIBYTE
BYTES_FOR_EACH = 3 * MEBIBYTE


def tokenise_all(
    blocks: Iterator[Block], tokenizer: Tokenizer, source: str, bos_token: str | None, reading: Reading, workers: int
) -> Generator[tuple[Block, Documents], None, None]:
    """Give each block with its documents, in the order of the blocks; with no workers, in this process.

    `source` is what a worker loads its tokenizer from. What goes wrong with a block is raised at its place in the
    order, after everything that comes before it.
    """
    if workers == 0:
        for block in blocks:
            yield block, tokenise(block, tokenizer, reading)
        return
    pool = _Pool(blocks, settings_message(source, bos_token, reading), workers)
    try:
        while (pair := pool.next()) is not None:
            block, answer = pair
            if isinstance(answer, BaseException):
                raise answer
            yield block, documents_of(_checked(answer), tokenizer.vocabulary)
    finally:
        pool.close()


def _checked(message: Message) -> Message:
    if "mistake" in message[0]:
        raise UserError(message[0]["mistake"])
    if "failure" in message[0]:
        raise RuntimeError(f"a worker of the preparation failed:\n{message[0]['failure']}")
    return message


class _Pool:
    """Worker processes, each with a thread that feeds it and one that listens to it."""

    def __init__(self, blocks: Iterator[Block], settings: dict[str, Any], workers: int) -> None:
        self._blocks = blocks
        self._reading = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[int, tuple[Block | None, Message | BaseException]] = {}
        self._read, self._given, self._limit = 0, 0, workers * (2 + AHEAD)
        self._bytes, self._byte_limit = 0, max(BYTES_UNDER_WAY, workers * BYTES_FOR_EACH)
        self._end: int | None = None
        self._closed = False
        self._processes = [self._start(settings) for _ in range(workers)]
        self._threads = [
            threading.Thread(target=target, args=arguments, daemon=True)
            for process in self._processes
            for target, arguments in self._jobs(process)
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> tuple[Block, Message | BaseException] | None:
        """Wait for the next block in order and its answer; None after the last."""
        with self._changed:
            while self._given not in self._answers:
                if self._end is not None and self._given >= self._end:
                    return None
                self._changed.wait()
            block, answer = self._answers.pop(self._given)
            self._given += 1
            self._bytes -= 0 if block is None else len(block.payload)
            self._changed.notify_all()
        if block is None:
            assert isinstance(answer, BaseException)
            raise answer
        return block, answer

    def close(self) -> None:
        """End the workers and wait for the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join(timeout=10)
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()

    def _start(self, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            # Without -P a random.py or a numpy.py in the current folder would be imported instead of the real one.
            [sys.executable, "-P", "-m", "mesanet.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            send(process.stdin, settings)  # type: ignore[arg-type]
        return process

    def _jobs(self, process: subprocess.Popen[bytes]) -> list[tuple[Any, tuple[Any, ...]]]:
        waiting: list[tuple[int, Block]] = []
        return [(self._feed, (process, waiting)), (self._listen, (process, waiting))]

    def _feed(self, process: Any, waiting: list[tuple[int, Block]]) -> None:
        """Read blocks and send them to one worker, never more than AHEAD beyond the one that it works on."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(waiting) <= AHEAD)
            item = self._take(waiting)
            if item is None:
                return
            with contextlib.suppress(BrokenPipeError, ValueError):
                header, payload = block_message(item)
                send(process.stdin, header, payload)

    def _take(self, waiting: list[tuple[int, Block]]) -> Block | None:
        """Read the next block of the sources and note who works on it; None at the end."""
        with self._reading:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._read - self._given < self._limit)
                if self._closed or self._end is not None:
                    return None
            try:
                block = next(self._blocks, None)
            except BaseException as error:  # noqa: BLE001 - handed to the one who asks for the blocks, and raised there
                self._stop_reading(error)
                return None
            if block is None:
                self._stop_reading(None)
                return None
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_room(len(block.payload)))
                waiting.append((self._read, block))
                self._read += 1
                self._bytes += len(block.payload)
                self._changed.notify_all()
            return block

    def _has_room(self, size: int) -> bool:
        return self._bytes == 0 or self._bytes + size <= self._byte_limit

    def _stop_reading(self, error: BaseException | None) -> None:
        with self._changed:
            if error is not None:
                self._answers[self._read] = (None, error)
                self._read += 1
            self._end = self._read
            self._changed.notify_all()

    def _listen(self, process: subprocess.Popen[bytes], waiting: list[tuple[int, Block]]) -> None:
        """Bring one worker's answers back until the sources end or it dies."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or waiting or self._end is not None)
                if self._closed or not waiting:
                    return
            assert process.stdout is not None
            message = receive(process.stdout)  # type: ignore[arg-type]
            answer: Message | BaseException = message if message is not None else _death(process)
            with self._changed:
                number, block = waiting.pop(0)
                self._answers[number] = (block, answer)
                self._changed.notify_all()


def _death(process: subprocess.Popen[bytes]) -> RuntimeError:
    code = process.wait()
    cause = f"signal {-code}" if code < 0 else f"exit code {code}"
    return RuntimeError(f"a worker of the preparation died ({cause}); finished shards are kept, run the command again")
