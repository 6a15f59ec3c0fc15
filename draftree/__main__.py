"""`python -m draftree`: the same as the `draftree` command."""

from draftree.cli import main

if __name__ == "__main__":
    main()
