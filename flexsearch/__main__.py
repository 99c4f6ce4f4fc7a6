"""``python -m flexsearch``: the command ``flexsearch``."""

from flexsearch.cli import main

if __name__ == "__main__":
    main()
