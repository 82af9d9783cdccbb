"""The join line: what was written is read back, and every slip of a finger is named."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cluster.join_token import MAX_TOKEN_CHARS, JoinToken, format_join_token, parse_join_token
from swarmnode.errors import InvalidRequest

hosts = st.text(string.ascii_letters + string.digits + ".-[]:", min_size=1, max_size=128)
tokens = st.builds(
    JoinToken,
    ca_hash=st.binary(min_size=32, max_size=32),
    addresses=st.lists(hosts, min_size=1, max_size=8).map(tuple),
    id=st.binary(min_size=8, max_size=8),
    secret=st.binary(min_size=32, max_size=32),
)
TOKEN = JoinToken(bytes(32), ("192.168.1.7:7700", "[fe80::1]:7700"), b"12345678", b"s" * 32)
LINE = format_join_token(TOKEN)


@given(tokens)
def test_what_was_written_is_read_back(token: JoinToken) -> None:
    line = format_join_token(token)
    assert parse_join_token(f"  {line}\n") == token
    assert len(line) <= MAX_TOKEN_CHARS
    assert set(line) <= set(string.ascii_letters + string.digits + "-_.")


@given(st.data())
def test_a_changed_character_is_named_as_a_bad_checksum(data: st.DataObject) -> None:
    position = data.draw(st.sampled_from([i for i in range(len("swn1."), len(LINE)) if LINE[i] != "."]))
    typed = data.draw(
        st.sampled_from(string.ascii_letters + string.digits + "-_").filter(lambda c: c != LINE[position])
    )
    with pytest.raises(InvalidRequest, match="checksum"):
        parse_join_token(LINE[:position] + typed + LINE[position + 1 :])


@given(st.integers(1, len(LINE) - 1))
def test_a_line_cut_short_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequest):
        parse_join_token(LINE[:length])


@given(st.text(max_size=300))
def test_anything_else_is_refused_and_nothing_else_raised(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_join_token(text)


BAD = {
    "swn2" + LINE[4:]: "update swarmnode",
    "swn10" + LINE[4:]: "update swarmnode",
    "swn0" + LINE[4:]: "make a new one",
    "sk-swarm-abc": "begins with swn1",
    "127.0.0.1:7700": "begins with swn1",
    LINE + ".x": "not 6",
    "swn1." + "a" * MAX_TOKEN_CHARS: "at most",
}


@pytest.mark.parametrize(("line", "message"), BAD.items())
def test_the_message_says_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_join_token(line)


@pytest.mark.parametrize("addresses", [(), ("",), ("a,b",), ("a b",), ("ä:1",), ("x" * 129,), ("a:1",) * 9])
def test_addresses_that_cannot_be_written_are_refused(addresses: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="address"):
        JoinToken(bytes(32), addresses, bytes(8), bytes(32))


def test_the_secret_is_in_no_traceback() -> None:
    assert "ssss" not in repr(TOKEN)
    assert TOKEN.secret.hex() not in repr(TOKEN)
