"""Run the command line as `python -m ensemblepp`."""

from ensemblepp.cli import main

if __name__ == "__main__":
    main()
