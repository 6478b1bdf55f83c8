"""`python -m treepack`: the script `treepack`, where that is not on the path."""

from .cli import main

if __name__ == "__main__":
    main()
