"""A run whose units are jobs of a real Slurm, in short; what else a cluster does to jobs: test_slurm_long.py."""

from __future__ import annotations

import pytest

from tests.end_to_end.slurm import NAMES, WITHIN_S, cluster, eventually, quickstart, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def test_a_cluster_that_is_left_early_leaves_no_process() -> None:
    with pytest.raises(AssertionError, match="early"), cluster() as place:
        place.ask("sbatch", "-o", "/dev/null", "--wrap", "trap '' TERM; sleep 600 & wait")
        eventually(lambda: place.ask("squeue", "-h", "-t", "running"), WITHIN_S)
        raise AssertionError("early")
    assert not place.processes()


def test_a_run_of_jobs_is_edited_launched_broken_taken_away_and_stopped() -> None:
    with quickstart() as jobs:
        jobs.launch("--emit=jobs")
        assert not jobs.jobs()
        script = jobs.place.folder / "jobs" / "iowa.slurm"
        script.write_text(script.read_text().replace("exec ", "echo edited\nexec "))
        jobs.launch("--from=jobs", "--detach")
        assert sorted(jobs.jobs()) == NAMES

        jobs.trains("iowa", 1)
        assert "edited" in jobs.log("iowa").read_text()
        assert "injected, verified" in jobs.diloco("chaos", "kill", "iowa")
        jobs.trains("iowa", 2)

        jobs.diloco("chaos", "preempt", "iowa")
        eventually(lambda: jobs.jobs()["iowa"][1] == "PENDING", WITHIN_S)
        assert "STOPPED" in jobs.diloco("stop", "quickstart")
        eventually(lambda: not jobs.jobs(), WITHIN_S)
