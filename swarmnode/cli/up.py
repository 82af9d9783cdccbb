"""`swarmnode up` and the hidden `swarmnode worker`."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.available_memory import offered_memory_bytes
from swarmnode.cli.output import JsonFlag, console, parse_size, print_json
from swarmnode.errors import InvalidRequest
from swarmnode.ids import parse_node_name
from swarmnode.wire.address import API_LISTEN, SWARM_LISTEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

    from swarmnode.wire.address import Address, ApiUrl

ROLES = ("coordinator", "peer")

AdvertiseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--advertise",
        help="HOST:PORT others should dial instead, as seen from outside; repeat it, and they take the fastest.",
    ),
]
AdvertiseApiOption = Annotated[
    str | None, typer.Option("--advertise-api", help="URL of the API port, for peers that reach nothing else.")
]
VoterFlag = Annotated[
    bool,
    typer.Option("--voter", help="Be able to coordinate: with three such nodes the swarm outlives its coordinator."),
]
JoinOption = Annotated[
    str | None,
    typer.Option(
        "--join",
        envvar="SWARM_JOIN",
        help="What `swarmnode join-token` printed; needed on the first start only. In SWARM_JOIN instead, no "
        "other user of this machine sees it.",
    ),
]

MEMORY_HELP = (
    "What a stage may take, like 6G; of a card's memory where it computes on one. [80 % of what is available, "
    "85 % of what is free on a card]"
)
UP_HELP = """Run this machine's node until Ctrl-C.

Examples:

    swarmnode up --role coordinator

    swarmnode up --role coordinator --swarm-listen 0.0.0.0:7700 --advertise 192.168.1.7:7700

    swarmnode up --role peer --join swn1.…        (the line that `swarmnode join-token` prints; once per machine)

    swarmnode up --role coordinator --role peer --memory 6G

    swarmnode up --role peer --voter --swarm-listen 0.0.0.0:7700 --advertise 192.168.1.8:7700

                                                  (coordinates when the coordinator is gone; it takes two of these)
"""


def register(app: typer.Typer) -> None:
    app.command("up", help=UP_HELP)(up)
    app.command("worker", hidden=True)(worker)


def up(
    role: Annotated[list[str], typer.Option("--role", help="coordinator or peer; give it twice to be both.")],
    voter: VoterFlag = False,
    join: JoinOption = None,
    swarm_listen: Annotated[
        str | None,
        typer.Option(
            "--swarm-listen", help=f"HOST:PORT of the swarm port. [{SWARM_LISTEN}; peers: any, voters keep theirs]"
        ),
    ] = None,
    advertise: AdvertiseOption = None,
    advertise_api: AdvertiseApiOption = None,
    api_listen: Annotated[
        str | None, typer.Option("--api-listen", help=f"HOST:PORT of the OpenAI endpoint. [{API_LISTEN}]")
    ] = None,
    api_host: Annotated[
        list[str] | None, typer.Option("--api-host", help="Another name the API answers to; repeat it.")
    ] = None,
    api_origin: Annotated[
        list[str] | None,
        typer.Option("--api-origin", help="Pages that may call the API, like http://den:8080, or *; repeat it."),
    ] = None,
    api_cert: Annotated[Path | None, typer.Option("--api-cert", help="Certificate chain (PEM) of the API.")] = None,
    api_key: Annotated[Path | None, typer.Option("--api-key", help="The certificate's key (PEM).")] = None,
    insecure_open_api: Annotated[
        bool, typer.Option("--insecure-open-api", help="Let everybody on the network in while there are no tokens.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Identity, models and state; one per node. [SWARM_DATA_DIR]")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What people call this node. [host name]")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads of a stage; 0: all cores.")] = 0,
    memory: Annotated[str | None, typer.Option("--memory", help=MEMORY_HELP)] = None,
    json_output: JsonFlag = False,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    import trio

    from swarmnode.cluster.join_token import parse_join_token
    from swarmnode.node import NodeOptions, run_node
    from swarmnode.roles.api_port import ApiOptions
    from swarmnode.roles.context import PeerResources
    from swarmnode.wire.address import parse_address

    _check_roles(role)
    coordinator = "coordinator" in role
    listen_api = api_listen or (API_LISTEN if coordinator or voter else None)
    api = listen_api and ApiOptions(
        parse_address(listen_api),
        hosts=tuple(api_host or ()),
        origins=tuple(api_origin or ()),
        certificate=api_cert,
        key=api_key,
        insecure_open=insecure_open_api,
    )
    options = NodeOptions(
        roles=tuple(r for r in ROLES if r in role),
        swarm_listen=_swarm_address(swarm_listen, coordinator=coordinator),
        api=api or None,
        join=parse_join_token(join) if join else None,
        advertise=tuple(map(parse_address, advertise or ())),
        advertise_api=_api_url(advertise_api),
        data_dir=data_dir,
        name=_checked_name(name),
        resources=PeerResources(
            parse_size(memory) if memory else offered_memory_bytes(),
            _checked_device(device),
            threads,
            bounded=memory is not None,
        ),
        voter=voter,
        end_with_stdin=end_with_stdin,
    )
    with _reporter(json_output=json_output) as report:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        trio.run(run_node, options, report)


def _check_roles(given: list[str]) -> None:
    for role in given:
        if role not in ROLES:
            raise InvalidRequest(f"--role {role!r} is not one of {', '.join(ROLES)}")


def _api_url(text: str | None) -> ApiUrl | None:
    from swarmnode.wire.address import ApiUrl, parse_place

    place = parse_place(text) if text is not None else None
    if place is not None and not isinstance(place, ApiUrl):
        raise InvalidRequest(f"--advertise-api {text!r} is no URL; write http(s)://HOST[:PORT]")
    return place


def worker(parent: Annotated[int, typer.Option("--parent")]) -> None:
    """Hold one stage for the node that started this process."""
    from swarmnode.compute.worker import main

    main(parent)


def _swarm_address(given: str | None, *, coordinator: bool) -> Address | None:
    from swarmnode.wire.address import parse_address

    wanted = given or (SWARM_LISTEN if coordinator else None)
    return parse_address(wanted) if wanted is not None else None


def _checked_name(name: str | None) -> str | None:
    try:
        return parse_node_name(name) if name is not None else None
    except ValueError as error:
        raise InvalidRequest(f"--name: {error}") from error


def _checked_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", device):
        raise InvalidRequest(f"--device {device!r} is not one of auto, cpu, cuda or cuda:N")
    return device


@contextmanager
def _reporter(*, json_output: bool) -> Iterator[Callable[[str, Mapping[str, object]], None]]:
    """Lines of JSON, or sentences, the same trouble once in a row; on a terminal with a few lines below them that say
    how things stand."""
    if json_output:
        yield lambda event, values: print_json({"event": event, **values})
        return
    from swarmnode.ui.sentences import sentence

    screen, lost = console(), ""
    with _view_below(screen) as note:

        def report(event: str, values: Mapping[str, object]) -> None:
            nonlocal lost
            note(event, values)
            said = sentence(event, values)
            if event == "coordinator_lost":
                said, lost = ("" if said == lost else said), said
            if said:
                screen.print(said, markup=False, soft_wrap=True)  # which draws the view anew

        yield report


@contextmanager
def _view_below(screen: Console) -> Iterator[Callable[[str, Mapping[str, object]], None]]:
    if not screen.is_terminal or screen.is_dumb_terminal:
        yield lambda _event, _values: None
        return
    from rich.live import Live

    from swarmnode.ui.up_view import UpView

    view = UpView()
    with Live(view, console=screen, auto_refresh=False, transient=True):
        screen.show_cursor(True)  # a second Ctrl-C ends this process at once, and nobody would show it again
        yield view.apply
