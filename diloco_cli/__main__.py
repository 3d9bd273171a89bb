"""`python -m diloco_cli` is `diloco`: like that command it imports nothing from the working directory."""

import sys

from diloco_cli import __version__


def main() -> None:
    """Each host is asked for its version before anything starts there: that is told without what commands need."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
        return
    from diloco_cli.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    main()
