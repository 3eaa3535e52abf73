"""`python -m dilocox.cli`: the command, where it is not installed."""

from dilocox.cli.bootstrap import main

if __name__ == "__main__":
    main()
