"""`forebay results`: results that are there, and those that come."""

import shutil
import sys

import click

from broker import Client
from broker.subscription import Start
from deploy.cli.common import config_option, json_option, run
from deploy.cli.numbers import seconds
from deploy.cli.show import result_line, whole_json
from schemas.config import Config


def _start(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Start | None:
    match text:
        case None | "beginning" | "latest":
            return text
        case _ if text.isascii() and text.isdigit() and len(text) <= 18:
            return int(text)
    message = f"expected beginning, latest or an offset, got {text!r}"
    raise click.BadParameter(message)


@click.command()
@config_option
@click.option("-f", "--follow", is_flag=True, help="Go on with results as they come, until interrupted.")
@click.option("--request", "ids", multiple=True, metavar="ID", help="Only this request's result; may be repeated.")
@click.option("--replay", "replays", multiple=True, metavar="PLACE", help="Only what was put back from this dead letter.")
@click.option(
    "--from",
    "start",
    metavar="beginning|latest|OFFSET",
    callback=_start,
    help="Where to begin in each partition. [default: latest with --follow alone, else beginning]",
)
@click.option("--timeout", "timeout_s", type=seconds(0.1), help="With --follow: seconds to wait for the next one.")
@json_option("Print one JSON object a line.")
def results(
    *,
    config: Config,
    follow: bool,
    ids: tuple[str, ...],
    replays: tuple[str, ...],
    start: Start | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    r"""Print results, one a line, each request's once; ends with those that are there, unless --follow is given.

    A request that was put back from the dead letters has another result; --replay gives that one. Exits with 1 where
    a request asked for has no result yet.

    \b
    Examples:
        forebay results
        forebay results --follow --json
        forebay results --request 01K9ZQ4V7W3M7Y1R2A3B4C5D6E
        forebay results --follow --replay 0/12
    """
    if ids and replays:
        message = "--request and --replay exclude each other"
        raise click.UsageError(message)
    if start is None:
        start = "latest" if follow and not (ids or replays) else "beginning"
    missing = run(_print(config, start, ids, replays, follow=follow, timeout_s=timeout_s if follow else None, as_json=as_json))
    if missing:
        click.echo(f"forebay: no result yet for {', '.join(sorted(missing))}: --follow waits for it", err=True)
        raise SystemExit(1)


async def _print(
    config: Config,
    start: Start,
    ids: tuple[str, ...],
    replays: tuple[str, ...],
    *,
    follow: bool,
    timeout_s: float | None,
    as_json: bool,
) -> set[str]:
    """Print what is there, and give what was asked for and is not."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    async with Client(config) as client:
        found = client.results(start, follow=follow, ids=ids or None, replays=replays or None, timeout_s=timeout_s)
        async with found:
            async for result in found:
                click.echo(whole_json(result) if as_json else result_line(result, columns))
        return found.missing
