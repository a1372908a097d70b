"""``python -m batchradix``: the command line."""

from batchradix.cli.main import main

if __name__ == "__main__":
    main()
