"""A replica of torchft's Streaming DiLoCo: python tolerant.py FOLDER STEP_S SAVE_EVERY REPLICA REPLICAS LIGHTHOUSE

It trains until it is killed, and begins at the last checkpoint; what the others have done since, torchft fetches from
them. One of the replicas writes a checkpoint every SAVE_EVERY steps. Runs in the virtual environment of contenders.py.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from reader import FRAGMENTS, OUTER_LR, OUTER_MOMENTUM, H, Trainee
from restarted import checkpoints, save
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

EXCHANGE = timedelta(seconds=5)  # at most
QUORUM = timedelta(seconds=30)
QUORUM_RETRIES = 59  # one every .5 s, while the lighthouse starts anew


def main() -> None:
    folder, step_s, every, replica, replicas, lighthouse = sys.argv[1:]
    trainee = Trainee(float(step_s))
    model, optimizer = trainee.model, trainee.optimizer
    parts = model.parts()

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(saved: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=EXCHANGE), load_state_dict=load, state_dict=state,
        min_replica_size=1, use_async_quorum=False, replica_id=f"replica_{replica}", rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, hostname="127.0.0.1",
        timeout=EXCHANGE, quorum_timeout=QUORUM, connect_timeout=QUORUM, quorum_retries=QUORUM_RETRIES,
        init_sync=False,  # all begin alike
    )  # fmt: skip
    outer = [torch.optim.SGD(part.parameters(), OUTER_LR, OUTER_MOMENTUM, nesterov=True) for part in parts]
    with DiLoCo(manager, parts, optimizer, outer, sync_every=H):
        if found := checkpoints(Path(folder)):
            saved = torch.load(found[-1])
            for name, load_part in manager._load_state_dict_fns.items():
                load_part(saved["user"][name])
            manager.load_state_dict(saved["torchft"])
        trainee.steps, merged = manager.current_step() * (H // FRAGMENTS), manager.current_step()
        while True:
            trainee.step(int(replica), int(replicas))
            if manager.current_step() == merged:
                continue
            merged = manager.current_step()
            steps = merged * (H // FRAGMENTS)
            if manager.participating_rank() == 0 and steps % int(every) == 0:
                save(Path(folder), steps, manager._manager_state_dict())


if __name__ == "__main__":
    main()
