"""The `dilocox` command."""

import errno
import sqlite3
import sys
from importlib import metadata
from typing import Annotated

import typer

from dilocox.cli import (
    appoint,
    archive,
    attend,
    attest,
    check,
    config,
    coordinator,
    data,
    events,
    explain,
    export,
    generate,
    hold,
    identity,
    init,
    node,
    plan,
    show,
    testnet,
    top,
    verify,
)
from dilocox.cli.common import console, fail
from dilocox.cli.environment import Root
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.transport.memory import few_arenas

__all__ = ["app", "main"]

DISK_ERRORS = {
    errno.ENOSPC: "free some space on that disk, or use another --home; nothing that was announced is lost",
    errno.EDQUOT: "free some space within your quota, or use another --home",
    errno.EROFS: "that disk is read-only: use another --home",
    errno.EACCES: "use a --home that you may write to",
}
"""What a person can do about a disk."""

app = typer.Typer(
    name="dilocox",
    cls=Root,
    help="Train one language model together over the ordinary internet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"dilocox {metadata.version('dilocox')}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one language model together over the ordinary internet."""


app.command("init")(init.init)
app.command("check")(check.check)
app.command("coordinator")(coordinator.coordinator)
app.command("node")(node.node)
app.command("hold")(hold.hold)
app.command("archive")(archive.archive)
app.command("appoint")(appoint.appoint)
app.command("pause")(attend.pause)
app.command("resume")(attend.resume)
app.command("leave")(attend.leave)
app.command("id")(identity.identity)
app.command("status")(show.status)
app.command("peers")(show.peers)
app.command("stages")(show.stages)
app.command("rounds")(show.rounds)
app.command("events")(events.events)
app.command("explain")(explain.explain)
app.command("top")(top.top)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("export")(export.export)
app.command("generate")(generate.generate)
app.add_typer(data.app, name="data")
app.add_typer(config.app, name="config")
app.add_typer(testnet.app, name="testnet")
app.add_typer(attest.app, name="attest")


def main() -> None:
    """Exit codes: 0 fine, 1 unexpected, 2 usage or configuration, 3 not running, 130 Ctrl-C."""
    few_arenas()
    try:
        try:
            app()
        except ConfigError as error:
            fail(str(error), 2)
        except (LocalError, RemoteError) as error:
            fail(str(error))
        except OSError as error:
            if error.filename is None and error.errno not in DISK_ERRORS:
                raise
            wrong_kind = isinstance(error, FileExistsError | NotADirectoryError)
            what = "is a file where a folder should be" if wrong_kind else error.strerror
            fail(f"{error.filename or 'a file'}: {what}", help=DISK_ERRORS.get(error.errno or 0))
        except sqlite3.OperationalError as error:
            fail(f"a database cannot be written: {error}", help=DISK_ERRORS[errno.ENOSPC])
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
