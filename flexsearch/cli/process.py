"""A command as a process: its streams, its signals, its errors, its exit code."""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
import traceback
from typing import NoReturn

from flexsearch import ranks
from flexsearch.cli import signals, streams
from flexsearch.errors import FlexsearchError, ImportModelError, UsageError

LONGEST = 200
"""Characters of one word of a message; what a user pasted may be longer."""


def run() -> NoReturn:
    """Run the command that ``sys.argv`` names, and end the process."""
    gc.set_threshold(20_000, 20, 20)  # a model or a search is many objects and little garbage
    arguments = sys.argv[1:]
    as_json = "--json" in arguments and not {"--help", "-h"} & set(arguments)
    streams.prepare(as_json)
    words = "interrupted" + ("" if arguments[:1] != ["optimize"] else " before a plan was found; nothing was written")
    with signals.handled(lambda message, _: _interrupted(message, as_json), words):
        code = _guarded(as_json) or signals.current.code
    if code and "RANK" in os.environ:
        os._exit(code)  # the interpreter's own end could wait for ranks that hang
    # The interpreter's end would look for cycles among the millions of objects of a search, for a second.
    atexit.register(gc.freeze)
    sys.exit(code)


def _guarded(as_json: bool) -> int:
    """The exit code of the command."""
    try:
        try:
            return _command()
        except FlexsearchError as error:
            signals.no_deadline()  # its block may not have ended: its error can be raised on the way out
            return _refuse(error, as_json)
        except MemoryError:
            return _refuse(FlexsearchError("there is not enough memory", "Use a smaller model or batch."), as_json)
        except KeyboardInterrupt:
            _interrupted(signals.current.words, as_json)
            return signals.current.code or 130
        except streams.PipeClosed:
            raise
        except Exception as error:
            return _bug(error, as_json)
    except streams.PipeClosed:
        return streams.PIPE_CLOSED
    except FlexsearchError as error:  # the message itself could not be printed
        _tell(error.kind, error.message, error.remedy, as_json=False)
        return 2


def _command() -> int:
    import typer

    from flexsearch.cli.app import app

    try:
        code = app(prog_name="flexsearch", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as error:  # typer raises none: it comes from the user's code
        raise ImportModelError(f"the model's code ended the process: sys.exit({error.code!r})") from error
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise _usage(error) from error
    if code == 130:  # what typer makes of a KeyboardInterrupt
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _usage(error: Exception) -> UsageError:
    """A wrong command line, with the place where help is to be had. typer keeps the class of such errors to itself."""
    context = getattr(error, "ctx", None)
    message: str = getattr(error, "format_message")()  # noqa: B009 - the class that has it is not public
    command = context.command_path if context is not None else "flexsearch"
    message = message.replace("Value error, ", "")  # what pydantic, which typer checks values with, puts before ours
    return UsageError(message.rstrip("."), f"See `{command} --help`.")


def _refuse(error: FlexsearchError, as_json: bool) -> int:
    """Say what the user can do about it. A rank that we started leaves that to us: all of them may say the same."""
    from flexsearch.runtime import launch

    if not launch.report_error(error):
        _tell(error.kind, error.message, error.remedy, as_json)
    return 2


def _interrupted(message: str, as_json: bool) -> None:
    """Say so. A rank that we started leaves that to us, too: a signal at a terminal reaches all of them."""
    if ranks.meeting_point() is None:
        _tell("interrupted", message, "", as_json)


def _bug(error: Exception, as_json: bool) -> int:
    traceback.print_exception(error, file=sys.stderr)
    words = f"{type(error).__name__}: {error}"
    _tell("internal_error", f"this is a bug of flexsearch: {words}", "Please report it with the lines above.", as_json)
    return 1


def _tell(kind: str, message: str, remedy: str, as_json: bool) -> None:
    """An error, for people on standard error, and for programs on standard output. Of several ranks, the first tells
    the programs."""
    text = str(FlexsearchError(message, remedy))
    print(f"flexsearch: {streams.printable(_shortened(text))}", file=sys.stderr, flush=True)
    if as_json and os.environ.get("RANK", "0") == "0":
        streams.emit({"error": {"kind": kind, "message": _shortened(message), "remedy": remedy}})


def _shortened(text: str) -> str:
    return re.sub(rf"\S{{{LONGEST},}}", lambda match: f"{match[0][: LONGEST // 2]}...", text)
