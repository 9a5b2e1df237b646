"""`python -m weft plan …` is `weft plan …`."""

from weft.cli.main import main

if __name__ == "__main__":
    main()
