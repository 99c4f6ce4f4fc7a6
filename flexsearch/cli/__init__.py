"""Floor 5: the commands. ``main`` is the console script; each command imports what it needs when it is called."""

# Nothing is imported here, not even from the standard library: see flexsearch/__init__.py.


def main() -> None:
    """Run the command that ``sys.argv`` names, and end the process. Exit codes: 0; 2 for a user's mistake, with a
    message on stderr and never a traceback; 1 for a bug of ours; 128 + the signal if one ended it."""
    from flexsearch.children import leave_current_folder

    leave_current_folder()
    from flexsearch.cli.process import run

    run()
