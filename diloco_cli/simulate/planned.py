"""A plan's islands as the simulators see them: each one a learner that fails as a whole and is restarted."""

from __future__ import annotations

from diloco_cli.errors import UsageError
from diloco_cli.plan.flow import drift_s
from diloco_cli.plan.goodput import restart_s
from diloco_cli.plan.plan import Plan
from diloco_cli.simulate.chips import MS, Learner
from diloco_cli.simulate.published import PUBLISHED
from diloco_cli.simulate.slots import MergeRules


def learners_of_plan(plan: Plan) -> tuple[Learner, ...]:
    """A "step" is one slot's work, after which a learner reports. Time away has the fitted form, scaled to the island's
    restart; what a failed island had not offered yet (half a round on average) is done again, as a pause when it is
    back. An island's share counts by its tokens per second."""
    settings = {island.name: island for island in plan.inventory.islands}
    made = []
    for island in plan.islands:
        if island.name not in settings:
            raise UsageError(f"the plan's island {island.name!r} is not in the plan's inventory", hint="diloco plan")
        mtbf_s = settings[island.name].mtbf_s
        made.append(
            Learner(
                name=island.name,
                slices=1,
                failures_per_s=1.0 / mtbf_s if mtbf_s else 0.0,
                step_ms=max(1, round(plan.schedule.slot_s * MS)),
                down_ms=0,
                up_ms=round(plan.schedule.round_s / 2 * MS),
                repair=PUBLISHED.repair.with_mean(restart_s(settings[island.name])),
                weight=island.tokens_per_s,
            )
        )
    return tuple(made)


def rules_of_plan(plan: Plan) -> MergeRules:
    """Quorum, overlap, grace and drift bound as planned."""
    return MergeRules(
        quorum=plan.schedule.quorum,
        overlap=plan.schedule.overlap,
        gamma=plan.run.sync.grace.gamma,
        sync_s=plan.schedule.exchange_s,
        skip_after_s=plan.run.sync.skip_after_s,
        drift_s=drift_s(plan.run.sync, plan.schedule),
    )
