"""Errors: stable codes, statuses, and the way across processes and back."""

from __future__ import annotations

import re

import pytest

from swarmnode.errors import MAX_MESSAGE_CHARS, InternalError, SwarmError, from_wire


def all_errors() -> list[type[SwarmError]]:
    found, queue = [], [SwarmError]
    while queue:
        subclasses = queue.pop().__subclasses__()
        found += subclasses
        queue += subclasses
    return [cls for cls in found if cls.__module__ == "swarmnode.errors"]


ERRORS = all_errors()


def test_codes_are_unique_and_well_formed() -> None:
    codes = [cls.code for cls in ERRORS]
    assert len(set(codes)) == len(codes) > 10
    assert all(re.fullmatch(r"[a-z][a-z_]*[a-z]", code) for code in codes)


@pytest.mark.parametrize("cls", ERRORS)
def test_an_error_comes_back_from_the_wire_as_itself(cls: type[SwarmError]) -> None:
    sent = cls("it holds 5; 4 is allowed")
    back = from_wire(sent.code, sent.message)
    assert type(back) is cls
    assert back.message == str(back) == sent.message


@pytest.mark.parametrize("cls", ERRORS)
def test_statuses_are_errors_and_a_retry_is_only_promised_for_what_may_pass(cls: type[SwarmError]) -> None:
    assert 400 <= cls.status <= 599
    assert not cls.retryable or cls.status >= 500 or cls.status in (408, 409, 429)


def test_an_unknown_code_keeps_its_text() -> None:
    back = from_wire("from_the_future", "something new")
    assert type(back) is InternalError
    assert back.message == "from_the_future: something new"


def test_a_message_is_cut_before_it_travels() -> None:
    error = InternalError("x" * (MAX_MESSAGE_CHARS + 1))
    assert len(error.message) == MAX_MESSAGE_CHARS


def test_the_field_at_fault_is_kept() -> None:
    assert SwarmError("no", param="top_p").param == "top_p"
    assert SwarmError("no").param is None
