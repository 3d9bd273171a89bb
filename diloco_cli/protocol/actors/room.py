"""What a syncer does when a write of its finds no room: it collects, so that the write can go on by itself.

The write waits meanwhile, and with it the syncer's turn, so this is a turn of its own. It raises no state of the
syncer: a floor that it commits takes the number of the commit that waits, and the syncer finds that out when it tries
that number. It then decides anew, or writes the same again; outcomes that the commit was to bring go with the next one.
What the run's settings promise to keep stays; readers have their grace.
"""

from __future__ import annotations

from diloco_cli.protocol.actors.collection import collected, floor_in_turn
from diloco_cli.protocol.actors.syncer import Syncer
from diloco_cli.protocol.log.commit_log import append, read_log
from diloco_cli.protocol.log.operations import Now, Steps

MAKES_FOR_S = 5.0  # then the write is tried again
WHY = "no space is left"


def make_room(syncer: Syncer) -> Steps[bool]:
    """Delete for a while; where nothing is left to delete, raise the floor as far as the settings allow. False if
    neither can be done now. Without an epoch, only what lies behind the log's floor goes."""
    run, collector = syncer.run, syncer.housekeeper.collector
    if syncer.state.n < 0:
        return False
    state = yield from read_log(run, syncer.state)
    now_s: float = yield Now()
    collector.look(state, now_s)
    if (yield from collector.work(state, now_s, MAKES_FOR_S)):
        return True
    floor = floor_in_turn(run, state, idle=True)
    if floor is None or state.epoch != syncer.epoch or not collector.is_done(state):
        return False
    _, mine = yield from append(run, state, syncer.drafted(collected(floor, WHY)))
    return mine
