"""The group of all commands. A command's module is imported when it is used, so that `--help` stays quick."""

import importlib
import logging
from importlib import metadata

import click

from deploy.cli.common import guarded

COMMANDS = {
    "demo": ("deploy.cli.demo:demo", "From nothing to answers on this machine."),
    "local": ("deploy.cli.local:local", "Start, stop and look at the whole stack on this machine."),
    "submit": ("deploy.cli.submit:submit", "Send one request and print its answer."),
    "batch": ("deploy.cli.batch:batch", "Run files of OpenAI batch lines."),
    "results": ("deploy.cli.results:results", "Read results, past ones and those that come."),
    "status": ("deploy.cli.status:status", "Say where a request is, and why it waits."),
    "explain": ("deploy.cli.explain:explain", "Explain where a request would go, and why."),
    "cancel": ("deploy.cli.cancel:cancel", "Cancel a request, a batch, or all that a tenant has asked."),
    "tenants": ("deploy.cli.tenants:tenants", "Shares, rates and pauses of tenants, while it runs."),
    "dead-letters": ("deploy.cli.dead_letters:dead_letters", "List, show and put back what could not be served."),
    "simulate": ("deploy.cli.simulate:simulate", "Say what would happen: the same scheduling on modelled engines."),
    "topics": ("deploy.cli.topics:topics", "Make the topics and mend their settings."),
    "engines": ("deploy.cli.engines:engines", "Engines' environments, and their rates and pauses while it runs."),
    "dispatch": ("deploy.cli.dispatch:dispatch", "Run a dispatcher."),
    "work": ("deploy.cli.work:work", "Run a worker of an engine."),
    "check": ("deploy.cli.check:check", "Check configuration and connectivity, and say how to mend them."),
}


class LazyGroup(click.Group):
    """Knows its commands by name and a line of help, and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Name the commands in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            message = f"{module}.{attribute} is not a command"
            raise TypeError(message)
        return _readable(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _readable(command: click.Command) -> click.Command:
    r"""Turn the `\b` of raw docstrings into the character by which click keeps an example's lines apart."""
    command.help = (command.help or "").replace("\\b\n", "\b\n")
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _readable(below)
    return command


def _version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's signature
    if value and not context.resilient_parsing:
        click.echo(f"forebay {metadata.version('forebay')}")
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version.")
def cli() -> None:
    r"""Forebay: batch and stream inference over Kafka, on engines of unlike kinds.

    \b
    Example:
        forebay local up --engine sim
        forebay submit --stream "What is a forebay?"
    """


def main() -> None:
    """Run the command line; never returns."""
    logging.lastResort = logging.NullHandler()  # commands tell what matters; `dispatch` and `work` log on purpose
    _readable(cli)
    guarded(lambda: cli.main(prog_name="forebay", standalone_mode=False))
