"""The fragments of one incarnation as it adopted and sent them, beside the parameters that it trains. Does the steps of
an adoption in their order. Values are those of the training port.
"""

from __future__ import annotations

from diloco_cli.protocol.actors.ports import Training, Values, Wire
from diloco_cli.protocol.log.records import Mixing


class Fragments:
    """`bases`: each fragment as it was adopted last; its next delta is measured from there."""

    def __init__(self, training: Training, wire: Wire) -> None:
        self._training, self._wire = training, wire
        self.bases: dict[int, Values] = {}
        self.sent: dict[int, dict[int, Values]] = {}

    def begin(self, fragment: int, merged: Values) -> None:
        """The version that an incarnation begins with."""
        self._training.write(fragment, merged)
        self.bases[fragment], self.sent[fragment] = merged, {}

    def adopt(self, fragment: int, merged: Values, mixing: Mixing, since: int | None) -> None:
        """Take over a merged version. `since`: with `rebase`, the progress since this offer is kept; None: all progress
        is kept, and the values sent are moved onto the new version too. Beside the merged version and the values sent
        it makes one copy of the fragment at a time."""
        base, sent = self.bases[fragment], self.sent[fragment]
        reference = None
        if mixing == "rebase":
            reference = base if since is None else sent[since]
        if mixing == "rebase" and since is None:
            for seq, values in sent.items():  # an upload may still read the old ones
                sent[seq] = self._wire.mix(mixing, merged, values, base)
        else:
            self.sent[fragment] = {}
        self._write_mixed(fragment, merged, mixing, reference)
        self.bases[fragment] = merged

    def _write_mixed(self, fragment: int, merged: Values, mixing: Mixing, reference: Values | None) -> None:
        own = merged
        if mixing != "replace":
            own = self._wire.mix(mixing, merged, self._training.read(fragment), reference, last=True)
        self._training.write(fragment, own)

    def send(self, fragment: int, seq: int, keep: bool) -> Values:
        """The parameters as they are now; `keep`: remember them for a later `rebase`."""
        values = self._training.read(fragment)
        if keep:
            self.sent[fragment][seq] = values
        return values

    def forget(self, fragment: int) -> None:
        """Forget the values sent of a fragment: no merge holds them, and none will."""
        self.sent[fragment] = {}

    def go_back(self, fragment: int) -> None:
        """Give up the progress since the adoption."""
        self._training.write(fragment, self.bases[fragment])
        self.sent[fragment] = {}
