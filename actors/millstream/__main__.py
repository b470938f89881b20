"""`python -m millstream` is the command line."""

from millstream.cli import main

if __name__ == "__main__":
    main(prog_name="millstream")
