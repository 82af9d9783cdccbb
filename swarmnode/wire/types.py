"""Types of header values: each says what it accepts and how the frame table in docs/wire.md writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class ValueType(Protocol):
    @property
    def text(self) -> str:
        """As the frame table writes it."""

    def accepts(self, value: object) -> bool: ...


def _number(value: int) -> str:
    exponent = (abs(value) + 1).bit_length() - 1
    if exponent >= 16 and abs(value) + 1 == 1 << exponent:
        return f"{'-' if value < 0 else ''}(2^{exponent}-1)"
    return str(value)


@dataclass(frozen=True, slots=True)
class Int:
    low: int
    high: int

    @property
    def text(self) -> str:
        return f"int {_number(self.low)} to {_number(self.high)}"

    def accepts(self, value: object) -> bool:
        return type(value) is int and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number that is not negative."""

    @property
    def text(self) -> str:
        return "number, finite, at least 0"

    def accepts(self, value: object) -> bool:
        return (type(value) is float or type(value) is int) and 0 <= value < math.inf


_NUMBER = Number()


@dataclass(frozen=True, slots=True)
class Flag:
    @property
    def text(self) -> str:
        return "bool"

    def accepts(self, value: object) -> bool:
        return type(value) is bool


@dataclass(frozen=True, slots=True)
class Text:
    max_chars: int

    @property
    def text(self) -> str:
        return f"str, at most {self.max_chars} characters"

    def accepts(self, value: object) -> bool:
        return type(value) is str and len(value) <= self.max_chars


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        return "one of " + ", ".join(self.values)

    def accepts(self, value: object) -> bool:
        return type(value) is str and value in self.values


@dataclass(frozen=True, slots=True)
class Ints:
    """A list of `least` to `most` integers. Checked without a Python step per entry: a piece has thousands, and
    every decode frame has half a dozen such lists of one."""

    least: int
    most: int
    low: int
    high: int

    @property
    def text(self) -> str:
        count = str(self.least) if self.least == self.most else f"{self.least} to {self.most}"
        return f"list of {count} int {_number(self.low)} to {_number(self.high)}"

    def accepts(self, value: object) -> bool:
        if type(value) is not list or not self.least <= len(value) <= self.most:
            return False
        if len(value) == 1:
            return type(value[0]) is int and self.low <= value[0] <= self.high
        return not value or (set(map(type, value)) == {int} and self.low <= min(value) and max(value) <= self.high)


@dataclass(frozen=True, slots=True)
class Numbers:
    """A list of at most `most` finite numbers that are not negative."""

    most: int

    @property
    def text(self) -> str:
        return f"list of 0 to {self.most} numbers, finite, at least 0"

    def accepts(self, value: object) -> bool:
        return type(value) is list and len(value) <= self.most and all(map(_NUMBER.accepts, value))


@dataclass(frozen=True, slots=True)
class Texts:
    most: int
    max_chars: int

    @property
    def text(self) -> str:
        return f"list of 0 to {self.most} str, each at most {self.max_chars} characters"

    def accepts(self, value: object) -> bool:
        entry = Text(self.max_chars)
        return type(value) is list and len(value) <= self.most and all(map(entry.accepts, value))


@dataclass(frozen=True, slots=True)
class SamplingList:
    """`ring.work.Sampling` as [temperature, top_p, min_p, top_k, seed]."""

    @property
    def text(self) -> str:
        return "list: temperature, top_p, min_p (numbers), top_k (int 0 to (2^31-1)), seed (64-bit int)"

    def accepts(self, value: object) -> bool:
        if type(value) is not list or len(value) != 5:
            return False
        *numbers, top_k, seed = value
        return (
            all(map(_NUMBER.accepts, numbers))
            and Int(0, 2**31 - 1).accepts(top_k)
            and Int(-(2**63), 2**64 - 1).accepts(seed)
        )
