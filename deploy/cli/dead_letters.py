"""`forebay dead-letters`: what could not be served, and putting it back."""

import shutil
import sys
from collections import deque
from typing import BinaryIO

import click
import msgspec

from broker.dead_letters import DeadLetter, Place, parse_place
from deploy.cli.common import EXIT_ERROR, config_option, json_option, run
from deploy.cli.letters import TITLES, letter_facts, letter_line, letter_text, letter_whole
from deploy.cli.replaying import Choice, Done, How, agree, look_over, put_back, read_letters, tell_plan, tell_rest
from schemas.config import Config
from schemas.errors import ErrorCode
from schemas.messages import ServiceClass

_CODES = [code.value for code in ErrorCode]
_code = click.option("--code", metavar="CODE", type=click.Choice(_CODES), help="Only those with this error code.")
_tenant = click.option("--tenant", help="Only this tenant's.")


@click.group("dead-letters")
def dead_letters() -> None:
    """List, show and put back what could not be served."""


# -- list -----------------------------------------------------------------------------------------------------------


@dead_letters.command("list")
@click.option("--all", "everything", is_flag=True, help="Those too that were put back.")
@_code
@_tenant
@click.option("--limit", type=click.IntRange(1, 1_000_000), help="Only so many, the newest.")
@json_option("Print one JSON object a line.")
@config_option
def list_letters(
    *, config: Config, everything: bool, code: str | None, tenant: str | None, limit: int | None, as_json: bool
) -> None:
    r"""List what could not be served and was not put back, the newest last.

    The first column is the place, by which `show` and `replay` know a dead letter.

    \b
    Examples:
        forebay dead-letters list
        forebay dead-letters list --code internal --tenant alice --limit 20
        forebay dead-letters list --all --json
    """
    count = run(_list(config, Choice((), code, tenant), limit, everything=everything, as_json=as_json))
    if not count:
        click.echo("no such dead letters" if code or tenant else "no dead letters", err=True)


async def _list(config: Config, choice: Choice, limit: int | None, *, everything: bool, as_json: bool) -> int:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    count, held = 0, deque[str]()

    def show(line: str) -> None:
        if not count and not as_json:
            click.echo(TITLES)
        click.echo(line)

    async with read_letters(config, put_back=everything) as (_, letters):
        async for letter in letters:
            if not choice.passes(letter):
                continue
            line = msgspec.json.encode(letter_facts(letter)).decode() if as_json else letter_line(letter, columns)
            if limit is None:
                show(line)
                count += 1
                continue
            held.append(line)
            if len(held) > limit:
                held.popleft()
    for line in held:
        show(line)
        count += 1
    return count


# -- show -----------------------------------------------------------------------------------------------------------


@dead_letters.command()
@click.argument("name", metavar="PLACE|ID")
@_tenant
@click.option("--raw", is_flag=True, help="Write the value alone, byte for byte.")
@json_option("Print one JSON object.")
@config_option
def show(*, config: Config, name: str, tenant: str | None, raw: bool, as_json: bool) -> None:
    r"""Show a dead letter: why it was given up, where it came from, what was tried, its headers and its value.

    Of several with one id it is the newest, before all one that was not put back.

    \b
    Examples:
        forebay dead-letters show 0/12
        forebay dead-letters show 0/12 --raw > request.json
    """
    if raw and as_json:
        message = "--raw and --json exclude each other"
        raise click.UsageError(message)
    letter, others = run(_find(config, Choice((name,), None, tenant)))
    if letter is None:
        click.echo(f"forebay: no dead letter {name}: `forebay dead-letters list --all` lists them", err=True)
        raise SystemExit(EXIT_ERROR)
    if raw:
        click.echo(letter.value or b"", nl=False)
        if letter.is_cut:
            click.echo(f"only the first {len(letter.value or b'')} of {letter.value_bytes} bytes were kept", err=True)
    else:
        click.echo(msgspec.json.encode(letter_whole(letter)).decode() if as_json else letter_text(letter))
    if others:
        click.echo(f"the same id also: {', '.join(map(str, others))}", err=True)


async def _find(config: Config, choice: Choice) -> tuple[DeadLetter | None, list[Place]]:
    found: DeadLetter | None = None
    others: list[Place] = []
    async with read_letters(config, put_back=True) as (_, letters):
        async for letter in letters:
            if not choice.passes(letter) or not choice.names_of(letter):
                continue
            if parse_place(choice.names[0]) == letter.place:
                return letter, []
            is_better = found is None or letter.put_back_at_ms is None or found.put_back_at_ms is not None
            if found is not None:
                others.append(found.place if is_better else letter.place)
            found = letter if is_better else found
    return found, others


# -- replay ---------------------------------------------------------------------------------------------------------


@dead_letters.command("replay")
@click.argument("names", metavar="[PLACE|ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All that can be served again; asks first on a terminal.")
@_code
@_tenant
@click.option("--class", "service_class", type=click.Choice(["interactive", "batch"]), help="Put them into this class.")
@click.option("--value", "mended", type=click.File("rb"), metavar="FILE", help="Put one back with this value instead of its own.")
@click.option("--force", is_flag=True, help="Those too that would be refused again.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would be put back.")
@json_option("Print one JSON object for each that was put back.")
@config_option
def replay_letters(
    *,
    config: Config,
    names: tuple[str, ...],
    everything: bool,
    code: str | None,
    tenant: str | None,
    service_class: ServiceClass | None,
    mended: BinaryIO | None,
    force: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    r"""Put dead letters back: each becomes a request again, once, in the topic of its class and with its own headers.

    Key and value stay as they are, and so does the id; a request that has none gets a new one. What was put back is
    not listed any more, and putting it back again does nothing. What would only be refused again is left out, and
    with --all only counted. Exits with 1 where something that was named was not put back.

    \b
    Examples:
        forebay dead-letters replay 0/12 01K9ZQ4V7W3M7Y1R2A3B4C5D6E
        forebay dead-letters replay --all --code internal --dry-run
        forebay dead-letters replay 0/13 --value mended.json
    """
    if bool(names) == everything:
        message = "name what to put back, or give --all"
        raise click.UsageError(message)
    if mended is not None and len(names) != 1:
        message = "--value goes with exactly one PLACE or ID"
        raise click.UsageError(message)
    choice = Choice(tuple(dict.fromkeys(names)), code, tenant)
    how = How(service_class, force, None if mended is None else mended.read())
    survey = run(look_over(config, choice, how))
    if dry_run:
        tell_plan(survey, as_json=as_json)
    elif survey.ready:
        if everything and not yes and sys.stdin.isatty():
            agree(survey.ready)
        done = Done(as_json=as_json)
        try:
            run(put_back(config, survey.ready, how, done.take))
        finally:
            done.close(len(survey.ready))
    tell_rest(survey, is_named=bool(names), as_json=as_json)
