"""Who gives which chunk: each is taken once, comes back when it failed, and is never waited for from nobody."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.catalog.chunk_pool import BATCH_BYTES, Batch, ChunkPool
from swarmnode.catalog.chunks import ChunkList

MIB = 1 << 20


def chunk_list(count: int, size: int = 4 * MIB) -> ChunkList:
    return ChunkList(tuple(size * (i + 1) for i in range(count)), (b"",) * count)


def test_a_batch_is_one_range_of_at_most_its_size() -> None:
    pool = ChunkPool({0: [0, 1, 2, 3, 4, 5, 7]}, [chunk_list(9)])
    assert pool.take_rest(anything=False) == Batch(0, 0, 4)
    assert pool.take_rest(anything=False) == Batch(0, 4, 6)
    assert pool.take_rest(anything=False) == Batch(0, 7, 8)
    assert pool.take_rest(anything=False) is None


def test_a_chunk_larger_than_a_batch_is_one() -> None:
    pool = ChunkPool({0: [0, 1]}, [chunk_list(2, BATCH_BYTES + 1)])
    assert pool.take_rest(anything=False) == Batch(0, 0, 1)


def test_peers_give_what_they_have_and_the_coordinator_the_rest() -> None:
    pool = ChunkPool({0: [0, 1, 2, 3]}, [chunk_list(4)])
    pool.offer("attic", {0: b"\0\1\1\0"})
    assert pool.take_rest(anything=False) == Batch(0, 0, 1)
    assert pool.take_rest(anything=False) == Batch(0, 3, 4)
    assert pool.take_rest(anything=False) is None
    taken = pool.take("attic")
    assert taken == Batch(0, 1, 3)
    pool.done(0, 1)
    pool.give_back(taken)
    pool.drop("attic")
    assert pool.take("attic") is None
    assert pool.take_rest(anything=False) == Batch(0, 2, 3)


def test_the_coordinator_takes_what_a_slow_peer_was_to_give() -> None:
    pool = ChunkPool({0: list(range(8))}, [chunk_list(8)])
    pool.offer("attic", {0: b"\1" * 8})
    assert pool.take("attic") == Batch(0, 0, 4)
    assert pool.take_rest(anything=False) is None
    assert pool.take_rest(anything=True) == Batch(0, 4, 8)


@pytest.mark.parametrize("peers", [2, 3])
@pytest.mark.parametrize("batches", [25, 200])
def test_those_that_fetch_the_same_at_once_ask_the_coordinator_for_little_twice(peers: int, batches: int) -> None:
    """In turns: all ask it for a batch, then take what the others have got, and so on."""
    count = 4 * batches
    pools = {f"n{peer}": ChunkPool({0: range(count)}, [chunk_list(count)], seed=f"n{peer}") for peer in range(peers)}
    marks = {name: bytearray(count) for name in pools}

    def take(name: str, batch: Batch) -> None:
        for file, index in batch.pieces:
            pools[name].done(file, index)
            marks[name][index] = 1

    given = 0
    while not all(pool.over for pool in pools.values()):
        asked = [(name, batch) for name, pool in pools.items() if (batch := pool.take_rest(anything=False))]
        given += sum(len(batch.pieces) for _, batch in asked)
        for name, batch in asked:
            take(name, batch)
        for name, pool in pools.items():
            for other in pools.keys() - {name}:
                pool.offer(other, {0: bytes(marks[other])})
                while (batch := pool.take(other)) is not None:
                    take(name, batch)
    assert given < 1.3 * count


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 30), peers=st.integers(0, 3), order=st.text(max_size=2))
def test_everything_arrives_once_whatever_the_peers_do(seed: int, count: int, peers: int, order: str) -> None:
    rng = random.Random(seed)
    wanted = {file: sorted(rng.sample(range(count), rng.randint(0, count))) for file in range(2)}
    pool = ChunkPool(wanted, [chunk_list(count), chunk_list(count)], order)
    came: list[tuple[int, int]] = []
    alive = [f"peer{i}" for i in range(peers)]
    for _ in range(2000):
        if pool.over:
            break
        source = rng.choice([*alive, ""])
        if source and rng.random() < 0.3:
            pool.offer(source, {file: bytes(rng.choice((0, 1)) for _ in range(count)) for file in range(2)})
        batch = pool.take(source) if source else pool.take_rest(anything=rng.random() < 0.2)
        if batch is None:
            continue
        arrived = batch.pieces if not source or rng.random() < 0.7 else batch.pieces[: rng.randint(0, 1)]
        for piece in arrived:
            came.append(piece)
            pool.done(*piece)
        pool.give_back(batch)
        if len(arrived) < len(batch.pieces):
            pool.drop(source)
            alive.remove(source)
    assert pool.over
    assert sorted(came) == [(file, index) for file in wanted for index in wanted[file]]


def test_what_is_left_is_promising_while_a_peer_has_some_of_it_or_it_is_under_way() -> None:
    pool = ChunkPool({0: [0, 1]}, [chunk_list(2)])
    assert not pool.promising
    pool.offer("den", {0: b"\1\0"})
    assert pool.promising
    batch = pool.take("den")
    assert batch is not None
    pool.drop("den")
    assert pool.promising, "it is under way"
    pool.done(0, 0)
    assert not pool.promising, "nobody has the other one"
    pool.offer("attic", {0: b"\0\1"})
    assert pool.promising
