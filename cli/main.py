"""The `dilocox` command."""

import sys
from typing import Annotated

import typer

from dilocox.cli.common import console, fail
from dilocox.cli.environment import Root
from dilocox.cli.exit_codes import Exit
from dilocox.transport.process.malloc import limit_arenas
from dilocox.views.error_codes import FAULTS, code_of, do_about

__all__ = ["app", "main"]

NO_HOME = "Could not determine home directory."
"""The error of `Path.home` where HOME is not set and the user has no entry in passwd: in containers, on batch systems."""
app = typer.Typer(
    name="dilocox",
    cls=Root,
    help="Train one language model together over the ordinary internet.",
    epilog="Each option can also be set in the environment: `dilocox data build --tokenizer` by DILOCOX_DATA_BUILD__TOKENIZER.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # loads slowly

        console.print(f"dilocox {metadata.version('dilocox')}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one language model together over the ordinary internet."""


def main() -> None:
    """Run the command, and exit with a code of exit_codes.py."""
    limit_arenas()
    try:
        try:
            app()
        except Exception as error:
            if isinstance(error, RuntimeError) and str(error) == NO_HOME:
                fail(
                    "this user has no home folder",
                    Exit.USAGE,
                    "set DILOCOX_HOME, or HOME, to a folder of this user",
                )
            if (code := code_of(error)) is None:
                raise
            fail(_sentence(error), Exit.USAGE if FAULTS[code].lasts else Exit.UNEXPECTED, do_about(code), code)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


def _sentence(error: Exception) -> str:
    match error:
        case OSError(strerror=str(why)):
            return f"{error.filename}: {why}" if error.filename is not None else why
        case MemoryError():
            return str(error) or "out of memory"
    return str(error)


if __name__ == "__main__":
    main()
