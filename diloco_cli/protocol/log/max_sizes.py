"""How long an object can be: what is longer is no honest writer's, and is not read to its end.

Records: MAX_RECORD_BYTES (protocol/log/wire.py); heartbeats: MAX_HEARTBEAT_BYTES
(protocol/log/heartbeats.py); everything else by the run's layout.
"""

from __future__ import annotations

from diloco_cli.layout import Layout

BYTES_PER_PARAMETER = 8
"""A state holds float32 parameters and momentum; a delta at most float32 values and as many norms; a cast less."""
HEADER_BYTES = 1 << 16  # of a payload: it names three tensors
MOMENTS_HEADER_BYTES = 8 << 20  # names every tensor of the model twice


def max_fragment_bytes(layout: Layout, fragment: int) -> int:
    """Of a delta, state or cast of this fragment; of one that there is not, nothing is long."""
    is_known = 0 <= fragment < len(layout.fragments)
    return HEADER_BYTES + (BYTES_PER_PARAMETER * layout.fragments[fragment].num_parameters if is_known else 0)


def max_moments_bytes(layout: Layout) -> int:
    """Of a learner's saved inner state: two float32 moments of each parameter."""
    return MOMENTS_HEADER_BYTES + BYTES_PER_PARAMETER * layout.num_parameters
