"""`python -m gossamer` is the command line."""

from gossamer_start import main

if __name__ == "__main__":
    main()
