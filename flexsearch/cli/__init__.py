"""Floor 5: the commands. ``main`` is the console script; each command imports what it needs when it is called."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run a command. A user's mistake ends with exit code 2 and a message on stderr, never with a traceback."""
    import typer

    from flexsearch.cli.app import app
    from flexsearch.errors import FlexsearchError

    try:
        code = app(prog_name="flexsearch", standalone_mode=False)
    except FlexsearchError as error:
        _refuse(str(error))
    except typer.BadParameter as error:
        _refuse(error.format_message(), error)
    except (KeyboardInterrupt, typer.Abort):
        print("flexsearch: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # no usage error (typer keeps their class to itself), but our bug
            raise
        _refuse(error.format_message(), error)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str, usage: Exception | None = None) -> None:
    """End with exit code 2; for a wrong command line, with the place where help is to be had."""
    context = getattr(usage, "ctx", None)
    if context is not None:
        message = f"{message.rstrip('.')}. See `{context.command_path} --help`."
    print(f"flexsearch: {message}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        sys.stdout.flush()
        os._exit(2)  # the interpreter's own end could wait for ranks that hang
    sys.exit(2)
