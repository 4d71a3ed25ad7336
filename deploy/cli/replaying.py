"""What `forebay dead-letters` does: finding out what is meant and what speaks against it, doing it, telling it."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

import click
import msgspec
from msgspec import Struct, structs

from broker.dead_letters import DeadLetter, DeadLetters, Place, parse_place
from broker.replay import PutBack, flaw, obstacle, replay
from broker.transport.connect import connect
from broker.transport.protocol import Transport
from deploy.cli.common import EXIT_ERROR
from deploy.cli.letters import put_back_facts, put_back_line
from deploy.cli.show import plain
from schemas.config import Config
from schemas.messages import ServiceClass
from schemas.topics import Topics

NAMED_MAX = 3  # replays that are named in the hint on how to follow them
TOLD_EVERY_S = 10.0

Letters = AsyncGenerator[DeadLetter, None]


class Choice(Struct, frozen=True):
    """Which dead letters are meant: those named, or all; of these, the ones that pass the filters."""

    names: tuple[str, ...] = ()
    code: str | None = None
    tenant: str | None = None

    def names_of(self, letter: DeadLetter) -> list[str]:
        """The names given that mean this letter; what reads as a place is one."""
        return [name for name in self.names if (parse_place(name) or name) in {letter.place, letter.id}]

    def passes(self, letter: DeadLetter) -> bool:
        """Whether the filters let it through."""
        return self.code in {None, letter.code} and self.tenant in {None, letter.tenant}


@contextlib.asynccontextmanager
async def read_letters(config: Config, *, put_back: bool = False) -> AsyncIterator[tuple[Transport, Letters]]:
    """Connect, and read the dead letters; those too that were put back where told so."""
    transport = connect(config.kafka)
    try:
        await transport.check()
        found = DeadLetters(transport, Topics(config.kafka.topic_prefix))
        async with contextlib.aclosing(found.read(put_back=put_back)) as letters:
            yield transport, letters
    finally:
        await transport.close()


class Survey(Struct):
    """What a replay would do, found out before it does anything."""

    ready: dict[Place, str] = msgspec.field(default_factory=dict)  # -> its code
    left_out: dict[Place, str] = msgspec.field(default_factory=dict)  # -> why
    put_back: list[str] = msgspec.field(default_factory=list)  # names of what was put back before
    wrong: list[str] = msgspec.field(default_factory=list)  # names that mean nothing, or too much


class How(Struct, frozen=True):
    """How dead letters are put back."""

    service_class: ServiceClass | None = None
    force: bool = False
    value: bytes | None = None  # in the place of the letter's own

    def mended(self, letter: DeadLetter) -> DeadLetter:
        """The letter as it is to be put back."""
        return letter if self.value is None else structs.replace(letter, value=self.value, is_cut=False)

    def objection(self, letter: DeadLetter, value_bytes_max: int) -> str | None:
        """Why it is not put back, or None."""
        letter = self.mended(letter)
        why = obstacle(letter, self.service_class)
        if why is not None or self.force:
            return why
        wrong = flaw(letter, value_bytes_max)
        mend = f"mend it (`show {letter.place} --raw > FILE`) and give it with --value FILE, or "
        mend = mend if self.value is None else ""
        return None if wrong is None else f"it would be refused again ({wrong}): {mend}send it all the same with --force"


async def look_over(config: Config, choice: Choice, how: How) -> Survey:
    """Find out what is meant, and what speaks against it."""
    found, meant = Survey(), {name: list[DeadLetter]() for name in choice.names}
    async with read_letters(config, put_back=bool(choice.names)) as (_, letters):
        async for letter in letters:
            names = choice.names_of(letter)
            if not choice.passes(letter) or (choice.names and not names):
                continue
            if letter.put_back_at_ms is None:
                why = how.objection(letter, config.value_bytes_max)
                if why is None:
                    found.ready[letter.place] = letter.code
                else:
                    found.left_out[letter.place] = why
            for name in names:
                meant[name].append(structs.replace(letter, value=None))
    _judge(found, meant)
    return found


def _judge(survey: Survey, meant: Mapping[str, Sequence[DeadLetter]]) -> None:
    """Find the names that mean nothing, and the ids that mean several letters: nobody may guess whose is meant."""
    named = {parse_place(name) for name in meant}
    for name, letters in meant.items():
        waiting = [letter for letter in letters if letter.put_back_at_ms is None]
        if not letters:
            survey.wrong.append(f"no dead letter {name}: `forebay dead-letters list --all` lists them")
        elif not waiting:
            survey.put_back.append(name)
        elif len(waiting) > 1:
            places = ", ".join(f"{letter.place} (tenant {letter.tenant or 'unknown'})" for letter in waiting)
            survey.wrong.append(f"{name} is the id of several: name one by its place: {places}")
            for letter in waiting:
                if letter.place not in named:
                    survey.ready.pop(letter.place, None)
                    survey.left_out.pop(letter.place, None)


async def put_back(config: Config, ready: Mapping[Place, str], how: How, report: Callable[[PutBack], None]) -> None:
    """Put back what was found ready, unless somebody else did so since.

    Args:
        config: The configuration.
        ready: Of a `Survey`.
        how: As the survey was told.
        report: Told of each.
    """
    async with read_letters(config) as (transport, letters):

        async def chosen() -> AsyncIterator[DeadLetter]:
            async for letter in letters:
                if letter.place in ready:
                    yield how.mended(letter)

        await replay(transport, Topics(config.kafka.topic_prefix), chosen(), report, how.service_class)


class Done:
    """Prints what was put back as it happens, and at the end how many, and how to follow them."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._count = self._new_ids = 0
        self._first: list[Place] = []
        self._told = time.monotonic()

    def take(self, done: PutBack) -> None:
        """One was put back."""
        self._count += 1
        self._new_ids += done.id is None
        if len(self._first) < NAMED_MAX:
            self._first.append(done.place)
        click.echo(msgspec.json.encode(put_back_facts(done)).decode() if self._as_json else put_back_line(done))
        if not sys.stdout.isatty() and time.monotonic() - self._told >= TOLD_EVERY_S:
            self._told = time.monotonic()
            click.echo(f"{self._count} put back so far", err=True)

    def close(self, wanted: int) -> None:
        """Say where it ended."""
        new = f", {self._new_ids} with a new id" if self._new_ids else ""
        which = "".join(f" --replay {place}" for place in self._first) if self._count <= NAMED_MAX else ""
        hint = f"; their results: forebay results --follow{which}" if self._count else ""
        click.echo(f"{self._count} of {wanted} put back{new}{hint}", err=True)


def agree(ready: Mapping[Place, str]) -> None:
    """Ask whether to put back so many.

    Raises:
        SystemExit: With 1 where the answer is no.
    """
    codes = ", ".join(f"{count} {code}" for code, count in sorted(Counter(ready.values()).items()))
    if not click.confirm(f"Put back {len(ready)} ({codes})?", err=True):
        click.echo("nothing was put back", err=True)
        raise SystemExit(EXIT_ERROR)


def tell_plan(survey: Survey, *, as_json: bool) -> None:
    """Print what would be done."""
    plan: dict[Place, str | None] = {**dict.fromkeys(survey.ready), **survey.left_out}
    for place, why in sorted(plan.items()):
        if as_json:
            click.echo(msgspec.json.encode({"place": str(place), "left_out": why}).decode())
        else:
            said = f"would be put back ({survey.ready[place]})" if why is None else f"left out: {why}"
            click.echo(plain(f"{place!s:<8}  {said}"))
    click.echo(f"{len(survey.ready)} would be put back, {len(survey.left_out)} left out", err=True)


def tell_rest(survey: Survey, *, is_named: bool, as_json: bool) -> None:
    """Tell what was not put back, and end with 1 where it was named."""
    if is_named:
        for name in survey.put_back:
            click.echo(f"{name} was put back before", err=True)
        problems = [*survey.wrong, *(f"dead letter {place}: {why}" for place, why in survey.left_out.items())]
        if problems:
            click.echo(f"forebay: {'; '.join(problems)}", err=True)
            raise SystemExit(EXIT_ERROR)
        return
    if survey.left_out:
        click.echo(f"{len(survey.left_out)} left out: `forebay dead-letters replay --all --dry-run` tells why", err=True)
    if not survey.ready and not survey.left_out and not as_json:
        click.echo("nothing to put back", err=True)
