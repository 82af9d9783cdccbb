"""Models that are to stay loaded: what the coordinator knows of each of them, and loads again when its ring is lost.

A model is wanted from the moment its ring first served: whoever asks for a load that fails is told so, and nothing is
tried again behind their back. It is let go when its ring is unloaded, was idle for too long, or makes room. A load that
is under way is written down beside those, so that whoever coordinates next finishes it.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.api.backend import LoadOptions
from swarmnode.cluster.desired_rings import (
    DesiredRings,
    LetGo,
    LoadBegun,
    LoadNow,
    NoPlace,
    Remembered,
    RingEnded,
    RingUp,
    RoomChanged,
    Told,
)
from swarmnode.driver import Driver
from swarmnode.errors import StageLost, SwarmError
from swarmnode.ids import ModelId, NodeId, RingId
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from swarmnode.roles.loaded_ring import LoadedRing

_OPTIONS = ("num_stages", "peers", "dtype", "quantization")
_ENDING = "its other stages to give their memory back"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Wanted:
    options: LoadOptions
    nodes: tuple[NodeId, ...]
    """Who held its stages last."""
    error: SwarmError | None = None
    """How its ring was lost; None while it was not."""
    stage: int | None = None
    waits_for: str = ""
    told: str = ""
    """What people were last told it waits for."""


class Restoring:
    """`load` begins a load that makes nobody leave, or raises, and `look` reads before it what may take long to read;
    `emit` hears what is lost and what it waits for."""

    def __init__(
        self,
        look: Callable[[ModelId], Awaitable[None]],
        load: Callable[[ModelId, LoadOptions], LoadedRing],
        emit: Callable[[str, Mapping[str, object]], None],
    ) -> None:
        self._look = look
        self._load = load
        self._emit = emit
        self._wanted: dict[ModelId, _Wanted] = {}
        self._begun: dict[RingId, tuple[ModelId, _Wanted]] = {}
        """Loads that somebody asked for, which are neither up nor over."""
        self._asked: dict[RingId, LoadOptions] = {}
        """What the rings that are there were loaded with."""
        self._looking: set[ModelId] = set()
        """Models that are due, and looked at before they are loaded."""
        self._nursery: trio.Nursery | None = None
        self._tries: set[RingId] = set()
        """Those that were loaded again, without anybody asking."""
        self._machine = DesiredRings()
        self._driver: Driver[Told, object, LoadNow] = Driver(self._machine, lambda _: None, self._load_again)

    async def run(self) -> None:
        """Load what is due, until cancelled."""
        async with open_flat_nursery() as nursery:
            self._nursery = nursery
            await self._driver.run()

    # what is wanted

    def remember(self, records: Iterable[Mapping[str, Any]]) -> None:
        """What a coordinator before this one wrote down."""
        for record in records:
            try:
                model, wanted = _read(record)
            except ValueError as error:
                _log.warning("a model of before cannot be loaded again: %s", error)
                continue
            wanted.error = StageLost("it was not loaded when this coordinator began")
            wanted.waits_for = "its peers to come back"
            self._wanted[model] = wanted
            self._driver.feed(Remembered(model))

    def records(self, leaving: Collection[str]) -> list[dict[str, Any]]:
        """As JSON values, without the models that are being unloaded."""
        kept = {**self._wanted, **dict(self._begun.values())}
        return [_record(model, kept[model]) for model in sorted(kept) if model not in leaving]

    def forget(self, model: ModelId) -> None:
        """It is not to be loaded again."""
        wanted = self._wanted.pop(model, None)
        self._looking.discard(model)
        self._driver.feed(LetGo(model))
        if wanted is not None and wanted.error is not None:
            self._emit("ring_let_go", {"model": model})

    # what happens to rings

    def begun(self, ring: LoadedRing, options: LoadOptions, *, asked: bool) -> None:
        """A load has begun, because somebody asked for it or because it was due."""
        self._asked[ring.ring] = options
        if asked:
            self._begun[ring.ring] = ModelId(ring.model), _Wanted(replace(options, prefer=()), ring.life.nodes)
        else:
            self._tries.add(ring.ring)
        self._looking.discard(ModelId(ring.model))
        self._driver.feed(LoadBegun(ModelId(ring.model)))

    def join(self, ring: LoadedRing) -> None:
        """Somebody asks for what is being loaded again: from now on it is their load."""
        self._tries.discard(ring.ring)

    def up(self, ring: LoadedRing) -> None:
        """It serves, or is taken over; said again, this changes nothing."""
        if ring.draining:
            return
        model = ModelId(ring.model)
        known = self._wanted.get(model)
        options = self._asked.get(ring.ring) or (known.options if known is not None else _options_of(ring))
        self._wanted[model] = _Wanted(replace(options, prefer=()), ring.life.nodes)
        self._settle(ring)
        self._driver.feed(RingUp(model))

    def failed(self, ring: LoadedRing) -> None:
        """It will not be up: the load that somebody asked for is nobody's to finish, though its memory is not back."""
        self._begun.pop(ring.ring, None)

    def over(self, ring: LoadedRing) -> None:
        """Its memory is back; a ring that was lost is loaded again."""
        self._asked.pop(ring.ring, None)
        self._settle(ring)
        model = ModelId(ring.model)
        wanted, lost = self._wanted.get(model), ring.life.error
        if ring.draining or lost is None:
            self.forget(model)
        elif wanted is not None:
            if lost.was_ready:
                wanted.error, wanted.stage, wanted.waits_for, wanted.told = ring.error, lost.stage, "", ""
                self._emit("ring_restoring", {"model": model, "why": lost.message})
            self._driver.feed(RingEnded(model))
            if not lost.was_ready:
                self._wait(model, wanted, f"another try, since the last one failed: {lost.message}")
        self.room_changed()

    def _settle(self, ring: LoadedRing) -> None:
        self._begun.pop(ring.ring, None)
        self._tries.discard(ring.ring)

    def drop_peers(self, removed: Collection[str]) -> None:
        """Who was removed does not come back under that identity: where it was named, any peers will do from now on."""
        for ring, options in self._asked.items():
            self._asked[ring] = _without(options, removed)
        for _, begun in self._begun.values():
            begun.options = _without(begun.options, removed)
        for model, wanted in self._wanted.items():
            options = _without(wanted.options, removed)
            if options != wanted.options:
                (name, *_) = (peer for peer in wanted.options.peers if peer in removed)
                wanted.options = options
                self._emit("ring_peers_dropped", {"model": model, "name": name})
        self.room_changed()

    def room_changed(self) -> None:
        """A peer has come, or one has less to hold."""
        self._driver.feed(RoomChanged())

    # what people see

    def error(self, model: ModelId, ring: LoadedRing | None) -> SwarmError | None:
        """How it was lost, while it is being loaded again; `ring` is the one that is there. Else None."""
        wanted = self._wanted.get(model)
        if wanted is None or (ring is not None and ring.draining):
            return None
        if ring is None or ring.ring in self._tries:
            return wanted.error
        lost = ring.life.error
        return ring.error if lost is not None and lost.was_ready else None

    def status(self, model: ModelId, ring: LoadedRing | None) -> dict[str, Any] | None:
        """As the API says it; None for a model that is not being loaded again."""
        wanted = self._wanted.get(model)
        error = self.error(model, ring)
        if wanted is None or error is None:
            return None
        due_s = self._machine.next_try_s(model)
        stage, waits_for = wanted.stage, wanted.waits_for
        if ring is not None:
            lost = ring.life.error
            waits_for = "" if lost is None else _ENDING
            stage = lost.stage if lost is not None and lost.was_ready else stage
        return {
            "stage": stage,
            "waits_for": waits_for,
            "next_try_s": None if due_s is None else round(max(0.0, due_s - trio.current_time()), 1),
            "failures": self._machine.failed_loads(model),
        }

    def waiting(self, models: Collection[str]) -> list[ModelId]:
        """Those that are wanted and are none of `models`, which have a ring."""
        return [model for model in sorted(self._wanted) if model not in models]

    def _load_again(self, due: LoadNow) -> None:
        if self._nursery is None:
            raise RuntimeError("a load before run")
        if due.model not in self._looking:
            self._looking.add(due.model)
            self._nursery.start_soon(self._look_and_load, due.model)

    async def _look_and_load(self, model: ModelId) -> None:
        try:
            await self._look(model)
            if model in self._looking:  # else somebody has begun to load it meanwhile, or wants it no more
                wanted = self._wanted[model]
                self._load(model, replace(wanted.options, prefer=wanted.nodes))
        except (SwarmError, OSError) as error:
            if model in self._looking:
                self._looking.discard(model)
                self._driver.feed(NoPlace(model))
                self._wait(model, self._wanted[model], str(error))

    def _wait(self, model: ModelId, wanted: _Wanted, waits_for: str) -> None:
        wanted.waits_for = waits_for
        if wanted.told != waits_for:
            wanted.told = waits_for
            self._emit("ring_waits", {"model": model, "waits_for": waits_for})


def _without(options: LoadOptions, removed: Collection[str]) -> LoadOptions:
    """Over as many stages, wherever there is a place, where one of `removed` is named."""
    if not {*options.peers} & {*removed}:
        return options
    return replace(options, peers=(), num_stages=len(options.peers))


def _options_of(ring: LoadedRing) -> LoadOptions:
    """Of a ring that a version loaded which did not write them down."""
    return LoadOptions(num_stages=len(ring.specs), dtype=ring.dtype, quantization=ring.asked_quantization)


def _record(model: ModelId, wanted: _Wanted) -> dict[str, Any]:
    options = {name: value for name, value in asdict(wanted.options).items() if name in _OPTIONS}
    return {"model": model, "nodes": list(wanted.nodes), **options, "peers": list(wanted.options.peers)}


def _read(record: Mapping[str, Any]) -> tuple[ModelId, _Wanted]:
    """Raises ValueError for what `_record` did not write."""
    try:
        stages, quantization = record["num_stages"], record["quantization"]
        options = LoadOptions(
            num_stages=None if stages is None else int(stages),
            peers=tuple(map(str, record["peers"])),
            dtype=str(record["dtype"]),
            quantization=None if quantization is None else str(quantization),
        )
        return ModelId(str(record["model"])), _Wanted(options, tuple(NodeId(str(node)) for node in record["nodes"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"its record does not fit: {error!r:.200}") from error
