"""What every command shares: finding the configuration, running a coroutine under signals, errors in one line.

A command is written like this:

    @click.command()
    @config_option
    def work(config: Config) -> None:
        run(do_it(config))

`run` cancels the coroutine on the first SIGINT or SIGTERM, and the process then ends with 130 or 143; a service gives
`on_stop` what to call instead, and what it ends with is its own. A second signal ends it at once.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from broker.discovery import discover, find_config
from schemas.config import Config

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEBUG_VARIABLE = "FOREBAY_DEBUG"
CONFIG_PATH = "forebay.config_path"  # in click's context: where the configuration was found, or None
EXIT_ERROR = 1
EXIT_BROKEN_PIPE = 141

_OURS = frozenset({"broker", "deploy", "dispatcher", "engine_consumers", "memory_coordinator", "schemas"})
_EXPECTED_MODULES = ("redis.exceptions",)


def load(path: Path | None = None) -> Config:
    """Find and read the configuration: see `broker.discovery.find_config` for where it is looked for.

    Raises:
        ConfigError: Naming the file, the field's path and what was expected.
    """
    return discover(path)


def _load_option(context: click.Context, _parameter: click.Parameter, path: Path | None) -> Config:
    found = find_config(path)
    context.meta[CONFIG_PATH] = found
    return load(found)


def config_option(command: F) -> F:
    """Add `--config PATH`; the command gets the configuration itself as its argument `config`."""
    return click.option(
        "--config",
        "config",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_load_option,
        help="The configuration; by default FOREBAY_CONFIG, ./forebay.toml, or that of the local stack.",
    )(command)


def json_option(help_text: str = "Print JSON.") -> Callable[[F], F]:
    """Add `--json`; the command gets it as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)


class _Watch:
    """Which signal came, and what is done about the first one."""

    def __init__(self) -> None:
        self.got: int | None = None
        self.stop: Callable[[], object] | None = None

    def on_signal(self, number: int, task: "asyncio.Task[Any]") -> None:
        if self.got is not None:
            os._exit(128 + number)
        self.got = number
        if self.stop is not None:
            self.stop()
        else:
            task.cancel()


_watch: ContextVar[_Watch] = ContextVar("watch")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in good order also when a signal comes.

    Returns:
        What the coroutine gives, also after a signal that it answered by stopping (see `on_stop`).

    Raises:
        SystemExit: With 130 after SIGINT and 143 after SIGTERM, once the coroutine has ended, unless it stopped by itself.
    """
    watch = _Watch()

    async def under_signals() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            message = "no task is running"
            raise RuntimeError(message)
        _watch.set(watch)
        for number in SIGNALS:
            loop.add_signal_handler(number, watch.on_signal, number, task)
        return await main

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        result = asyncio.run(under_signals())
    except asyncio.CancelledError:
        if watch.got is None:
            raise
    except Exception as error:
        if watch.got is None or watch.stop is not None:
            raise
        tell(error)
    finally:
        for number, handler in before.items():  # the loop's end put the system's own in their place
            signal.signal(number, handler)
    if watch.got is not None and watch.stop is None:
        raise SystemExit(128 + watch.got)
    return result


def on_stop(stop: Callable[[], object]) -> None:
    """Inside of `run`: the first signal calls this instead of cancelling; the coroutine then ends by itself, with a result."""
    _watch.get().stop = stop


def tell(error: BaseException) -> None:
    """Write an error to stderr in one line; with FOREBAY_DEBUG set, its traceback too."""
    if os.environ.get(DEBUG_VARIABLE):
        import traceback  # noqa: PLC0415

        traceback.print_exception(error, file=sys.stderr)
    first = leaf(error)
    text = " ".join(str(first).split()) or type(first).__name__
    if not is_expected(first):
        text = f"internal error: {type(first).__name__}: {text} (set {DEBUG_VARIABLE}=1 for the traceback)"
    click.echo(f"forebay: {text}", err=True)


def leaf(error: BaseException) -> BaseException:
    """Give the first error inside of groups that is worth telling."""
    while isinstance(error, BaseExceptionGroup):
        known = [e for e in error.exceptions if not isinstance(e, asyncio.CancelledError)]
        error = (known or list(error.exceptions))[0]
    return error


def is_expected(error: BaseException) -> bool:
    """Whether an error's own text tells a user what is wrong: ours, the system's, and those of Redis."""
    if isinstance(error, OSError):
        return True
    modules = {kind.__module__ for kind in type(error).__mro__}
    return any(module.partition(".")[0] in _OURS or module in _EXPECTED_MODULES for module in modules)


def guarded(command: Callable[[], object]) -> NoReturn:
    """Run the command line and end the process with the right code and at most one line.

    0 only on success, 1 on an error, 2 on wrong usage, 130 and 143 on signals, 141 where nobody reads the output.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        command()
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        _end(128 + signal.SIGINT)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        _end(error.exit_code)
    except click.ClickException as error:
        _tell_usage(error)
        _end(error.exit_code)
    except click.exceptions.Exit as error:
        _end(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _end(EXIT_BROKEN_PIPE)
    except Exception as error:  # noqa: BLE001 - the last place before a traceback
        tell(error)
        _end(EXIT_ERROR)
    _end(0)


def _tell_usage(error: click.ClickException) -> None:
    text = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    click.echo(f"forebay: {text}" + (f" See `{context.command_path} --help`." if context else ""), err=True)


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _end(code: int) -> NoReturn:
    raise SystemExit(code)
