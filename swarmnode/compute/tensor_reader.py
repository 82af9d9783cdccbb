"""Read stored tensors by their offsets, straight into the memory they stay in, whatever float they are stored as."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, cast

import torch

from swarmnode.compute.activation import bytes_of
from swarmnode.compute.stored_tensors import Part
from swarmnode.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swarmnode.compute.stored_tensors import Stored

    Progress = Callable[[str, int, int], None]
    """Called with "weights", bytes read so far and bytes in all."""
    Merge = Callable[[str, torch.Tensor], None]

STAGING_BYTES = 4 << 20
"""Converted or copied to a card in chunks of this size: large enough for the disk, small beside any slice."""
_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class TensorReader:
    """Reads tensors into fresh memory of one dtype and counts the bytes. `merge` changes a tensor in place, by name,
    as soon as it is read."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, progress: Progress | None = None, merge: Merge | None = None
    ) -> None:
        self.total = 0
        self._dtype, self.device, self._merge = dtype, device, merge
        self._progress, self._done, self._reported_s = progress, 0, 0.0
        self._again_bytes = 0
        """Of what is read next: they are counted already."""
        self._staging = memoryview(bytearray())

    def read(self, parts: tuple[Part, ...], shape: tuple[int, ...], room: torch.Tensor | None = None) -> torch.Tensor:
        """One parameter from its parts, into `room` if given; a file that ends early raises LoadFailed."""
        whole = torch.empty(shape, dtype=self._dtype, device=self.device) if room is None else room
        for part in parts:
            self._read_part(part.stored, part.place(whole))
        return whole

    def read_rows(self, source: Stored, begin: int, end: int, again: bool = False) -> torch.Tensor:
        """Rows begin … end-1 of a matrix that is stored whole; what is read `again` is not counted again, so that the
        count never goes back. Raises as `read` does."""
        entry = source.entry
        row_bytes, shape = entry.size_bytes // entry.shape[0], (end - begin, *entry.shape[1:])
        there = entry.begin + begin * row_bytes
        rows = replace(entry, shape=shape, begin=there, end=there + (end - begin) * row_bytes)
        if again:
            self._again_bytes = rows.size_bytes
        return self.read((Part(replace(source, entry=rows)),), shape)

    def read_bytes(self, source: Stored) -> torch.Tensor:
        """A uint8 tensor as it is stored; raises as `read` does."""
        raw = torch.empty(source.entry.shape, dtype=torch.uint8)
        with _opened(source) as file:
            self._read_into(file, bytes_of(raw), source.name)
        return raw

    def _read_part(self, source: Stored, target: torch.Tensor) -> None:
        stored = _TORCH_DTYPES[source.entry.dtype]
        with _opened(source) as file:
            if stored == self._dtype and self.device.type == "cpu":
                self._read_into(file, bytes_of(target), source.name)
            else:
                self._convert(file, target.view(-1), stored, source.name)
        if self._merge is not None:
            self._merge(source.name, target)

    def report(self) -> None:
        if self._progress is not None:
            self._progress("weights", self._done, self.total)

    def _read_into(self, file: BinaryIO, view: memoryview, name: str) -> None:
        while view:
            count = file.readinto(view[:STAGING_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise LoadFailed(f"tensor {name!r} ends early; fetch the stage's files again")
            view = view[count:]
            again = min(count, self._again_bytes)
            self._again_bytes -= again
            self._done += count - again
            self._report_sometimes()

    def _convert(self, file: BinaryIO, flat: torch.Tensor, stored: torch.dtype, name: str) -> None:
        if not self._staging:
            self._staging = memoryview(bytearray(STAGING_BYTES))
        step = STAGING_BYTES // stored.itemsize
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            raw = self._staging[: part.numel() * stored.itemsize]
            self._read_into(file, raw, name)
            part.copy_(torch.frombuffer(raw, dtype=stored))

    def _report_sometimes(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= 0.1:
            self._reported_s = now_s
            self.report()


class StoredMatrix:
    """A matrix in a file, for code that takes a weight some of its rows at a time: only those are ever in memory.
    Rows are taken in order, but the first may be taken as a sample before; the count of bytes has them once."""

    def __init__(self, reader: TensorReader, source: Stored) -> None:
        self.shape, self.device = torch.Size(source.entry.shape), reader.device
        self._reader, self._source, self._read_rows = reader, source, 0

    def __getitem__(self, rows: slice) -> torch.Tensor:
        begin, end, _ = rows.indices(self.shape[0])
        again = end <= self._read_rows
        self._read_rows = max(end, self._read_rows)
        return self._reader.read_rows(self._source, begin, end, again)


@contextmanager
def _opened(source: Stored) -> Iterator[BinaryIO]:
    """The tensor's file, at its first byte; what the file system refuses becomes LoadFailed."""
    try:
        with source.path.open("rb", buffering=0) as file:
            file.seek(source.entry.begin)
            yield cast("BinaryIO", file)
    except OSError as error:
        raise LoadFailed(f"tensor {source.name!r} of {source.path.name} cannot be read: {error}") from error
