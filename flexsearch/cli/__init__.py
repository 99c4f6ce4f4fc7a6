"""Floor 5: the commands. ``main`` is the console script; each command imports what it needs when it is called."""

# Of the standard library only what every interpreter has loaded when it starts: see flexsearch/__init__.py.
import os
import sys


def main() -> None:
    """Run the command that ``sys.argv`` names, and end the process. Exit codes: 0; 2 for a user's mistake, with a
    message on stderr and never a traceback; 1 for a bug of ours; 128 + the signal if one ended it."""
    _leave_current_folder()
    from flexsearch.cli.process import run

    run()


def _leave_current_folder() -> None:
    """Import nothing from the current folder from now on. It stays on the path if it is an absolute entry of
    PYTHONPATH, which somebody asked for, or where Python keeps installed packages."""
    asked = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(asked)
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was deleted
        here = ""

    def stays(place: str) -> bool:
        installed = place == os.path.dirname(os.__file__) or place.endswith(("site-packages", "dist-packages"))
        return os.path.isabs(place) and (place in asked or installed or os.path.realpath(place) != here)

    sys.path[:] = [place for place in sys.path if stays(place)]
