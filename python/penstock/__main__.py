"""``python -m penstock``: the command line, where the ``penstock`` script is not on PATH."""

from penstock.cli import main

if __name__ == "__main__":
    main()
