"""`python -m normgauge` is the command line."""

from normgauge.cli import main

if __name__ == "__main__":
    main()
