"""`python -m diloco_cli` is `diloco`: like that command it imports nothing from the working directory."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    from diloco_cli.cli.main import main

    main()
