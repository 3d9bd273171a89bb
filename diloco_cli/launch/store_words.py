"""What the units of this machine say of their store in their logs: the one way to hear it while the bucket itself takes
no beats."""

from __future__ import annotations

from diloco_cli.errors import NotFoundError
from diloco_cli.launch.logs import Line, log_files, tail

LINES = 20
MARK = " store: "


class StoreWords:
    """Lines about the store that have been written since this was made, each once."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._told: dict[str, str] = {}
        self.news()

    def news(self) -> list[Line]:
        """The newest such line of each unit, if it was not told before."""
        try:
            files = log_files(self._run)
        except NotFoundError:
            return []
        found = []
        for unit, path in sorted(files.items()):
            said = [text for text in tail(path, LINES) if MARK in text]
            if said and self._told.get(unit) != said[-1]:
                self._told[unit] = said[-1]
                found.append(Line(unit, said[-1].partition(MARK)[2]))
        return found
