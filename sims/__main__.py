"""`python -m sims SCENARIO [--json] [--seed N]`: one study of the ring in virtual time."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sims.report import lines
from sims.scenarios import chats, churn, failover, jitter, mixed, prompt, relay_cap, slow_uplink, stages, two_pcs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = _parser().parse_args(arguments)
    report: dict[str, Any] = chosen.run(chosen)
    print(json.dumps(report) if chosen.json else "\n".join(lines(report)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sims", description="Latency studies in virtual time.")
    scenarios = parser.add_subparsers(required=True, metavar="SCENARIO")

    def scenario(
        name: str, module: Any, run: Callable[[argparse.Namespace], dict[str, Any]]
    ) -> argparse.ArgumentParser:
        about = (module.__doc__ or "").strip()
        added = scenarios.add_parser(name, help=about.splitlines()[0].rstrip("."), description=about)
        added.add_argument("--json", action="store_true", help="one JSON object instead of lines")
        added.add_argument("--seed", type=int, default=0, help="of everything that varies")
        added.set_defaults(run=run)
        return added

    _two_pcs_flags(scenario("two-pcs", two_pcs, _run_two_pcs))
    scenario("relay-cap", relay_cap, lambda chosen: relay_cap.run(chosen.seed))
    added = scenario("prompt", prompt, lambda chosen: prompt.run(chosen.tokens, chosen.seed))
    added.add_argument("--tokens", type=_positive, default=1526)
    added = scenario("stages", stages, lambda chosen: stages.run(chosen.n, chosen.rtt_ms, chosen.jitter, chosen.seed))
    added.add_argument("--n", type=_span, default=range(2, 9), help="stages: a number, or a span like 2..8")
    added.add_argument("--rtt-ms", type=float, default=20.0, help="round trip between neighbours")
    added.add_argument("--jitter", type=float, default=0.0, help="varies every step by ± this share of it")
    added = scenario("mixed", mixed, lambda chosen: mixed.run(chosen.seed, chosen.jitter))
    added.add_argument("--jitter", type=float, default=0.0, help="varies every step by ± this share of it")
    scenario("jitter", jitter, lambda chosen: jitter.run(chosen.seed))
    added = scenario("failover", failover, _run_failover)
    added.add_argument("--nodes", type=_positive, default=5, help="machines that have to find the new coordinator")
    added.add_argument("--voters", type=_positive, default=3)
    added.add_argument("--failovers", type=_positive, default=1000)
    added = scenario("churn", churn, lambda chosen: churn.run(chosen.nodes, chosen.seconds, chosen.seed))
    added.add_argument("--nodes", type=_positive, default=50)
    added.add_argument("--seconds", type=_positive, default=600)
    added = scenario("chats", chats, lambda chosen: chats.run(chosen.seed, prefix_reuse=chosen.prefix_reuse))
    added.add_argument("--prefix-reuse", action=argparse.BooleanOptionalAction, default=True, help="park and continue")
    scenario("slow-uplink", slow_uplink, lambda chosen: slow_uplink.run(chosen.seed))
    return parser


def _two_pcs_flags(added: argparse.ArgumentParser) -> None:
    added.add_argument("--users", type=_positive, default=8)
    added.add_argument("--schedule", choices=["cost", "source"], default="cost")
    added.add_argument("--host-ms", type=float, default=0.0, help="host time per session and step on stage 0")
    added.add_argument(
        "--split-rows", action=argparse.BooleanOptionalAction, default=True, help="4-bit rows at stage 1"
    )
    added.add_argument("--max-batch", type=_whole, default=0, help="most sessions of a group; 0: no cap")
    added.add_argument("--groups", choices=["one", "per-stage"], default="per-stage", help="one: all sessions together")
    added.add_argument(
        "--coalesce-ms",
        type=float,
        help="the source's frames, one per session; a stage waits this long for the rest of a batch (0: for none)",
    )
    added.add_argument("--rtt-ms", type=float, default=21.0, help="round trip between the PCs")
    added.add_argument("--jitter", type=float, default=0.0, help="varies every step by ± this share of it")
    added.add_argument("--grid", action="store_true", help="users × round trips, both schedules against the bound")
    added.add_argument("--source-figures", action="store_true", help="what the source measured, and the flags of each")


def _run_failover(chosen: argparse.Namespace) -> dict[str, Any]:
    return failover.run(chosen.voters, chosen.failovers, chosen.seed, chosen.nodes)


def _run_two_pcs(chosen: argparse.Namespace) -> dict[str, Any]:
    if chosen.grid:
        return two_pcs.grid(chosen.seed, chosen.host_ms)
    if chosen.source_figures:
        return two_pcs.source_figures()
    names = two_pcs.TwoPcs.__dataclass_fields__
    return two_pcs.run(two_pcs.TwoPcs(**{name: getattr(chosen, name) for name in names}))


def _whole(text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number from {least} on")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _span(text: str) -> range:
    """Of stages: with one there is no ring."""
    first, _, last = text.partition("..")
    span = range(_whole(first, 2), _whole(last or first, 2) + 1)
    if not span:
        raise argparse.ArgumentTypeError(f"{text!r:.40} ends before it begins")
    return span


if __name__ == "__main__":
    main()
