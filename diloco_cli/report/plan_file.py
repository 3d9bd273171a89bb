"""What a report takes from the plan that `launch` left in the bucket. It decides nothing: a plan that cannot be read is
a report without one."""

from __future__ import annotations

import msgspec

from diloco_cli.config.origins import origin_of
from diloco_cli.plan.plan import Money, PlannedIsland, Prediction, Setting
from diloco_cli.protocol.log.keys import PLAN_KEY
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES
from diloco_cli.store.port import Store

MOST = 1e18  # whoever may write there may write any number


class LaunchPlan(msgspec.Struct, frozen=True):
    """The fields of `diloco plan --json` that a report uses, and where each setting of the run file came from."""

    prediction: Prediction
    money: Money
    islands: tuple[PlannedIsland, ...] = ()
    settings: tuple[Setting, ...] = ()
    origins: dict[str, str] = {}

    def island(self, name: str) -> PlannedIsland | None:
        return next((island for island in self.islands if island.name == name), None)

    def egress_per_gb(self, name: str) -> float:
        """The price of what leaves this island: the plan states it by the day, for as many bytes from each island."""
        island, gb_per_day = self.island(name), self.money.egress_gb_per_day / max(1, len(self.islands))
        return 0.0 if island is None or gb_per_day <= 0 else island.egress_per_day / gb_per_day

    def origin(self, key: str) -> str:
        searched = next((s.origin for s in self.settings if s.name == key and s.origin != "given"), None)
        return searched or origin_of(self.origins, key)


def read_launch_plan(store: Store) -> LaunchPlan | None:
    data = store.get(PLAN_KEY, MAX_RECORD_BYTES)
    try:
        plan = None if data is None else msgspec.json.decode(data, type=LaunchPlan)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return plan if plan is not None and _can_be_drawn(plan) else None


def _can_be_drawn(plan: LaunchPlan) -> bool:
    p, money = plan.prediction, plan.money
    numbers = [p.tokens_per_s_ideal, p.tokens_per_s, p.goodput, money.total, money.egress_gb_per_day]
    numbers += [stage.tokens_per_s for stage in p.waterfall]
    numbers += [number for island in plan.islands for number in (island.price_per_h, island.egress_per_day)]
    return all(0 <= number <= MOST for number in numbers)
