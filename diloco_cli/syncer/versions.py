"""Committed versions of the outer parameters, from the bucket into tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from diloco_cli.algorithm.flat import scatter
from diloco_cli.algorithm.payload import Spec, views
from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError
from diloco_cli.protocol.keys import state_key
from diloco_cli.protocol.records import Output, RunFormat
from diloco_cli.protocol.sizes import most_fragment_bytes
from diloco_cli.store.port import Store


def state_spec(num_parameters: int) -> Spec:
    """What a state object holds: float32 parameters and outer momentum, [n] each."""
    return {"parameters": (torch.float32, (num_parameters,)), "momentum": (torch.float32, (num_parameters,))}


def load_versions(run: RunFormat, outputs: Iterable[Output], store: Store, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the named versions into `tensors`. Raises DataCheckError if one is missing or damaged."""
    for output in outputs:
        fragment = run.layout.fragments[output.fragment]
        key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
        data = store.get(key, most_fragment_bytes(run.layout, output.fragment))
        if data is None or digest(data) != output.state_digest:
            raise DataCheckError("a committed state is missing or has other bytes than the log says", where=key)
        scatter(fragment, views(data, state_spec(fragment.num_parameters))["parameters"], tensors)
