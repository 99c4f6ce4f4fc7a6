"""``python -m flexsearch.cli``: how ``run`` and ``probe`` start their ranks, whatever the console script is called."""

from flexsearch.cli import main

if __name__ == "__main__":
    main()
