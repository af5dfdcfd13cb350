"""`python -m gossamer` is the command line."""

from gossamer.cli import main

if __name__ == "__main__":
    main()
