"""`diloco bucket-policy`: prints the bucket policy of one role of a run, ready for the cloud's own tools.

templates/bucket-policy holds them; its README says what each role may do."""

from __future__ import annotations

from typing import cast, get_args

import typer

from diloco_cli.cli.run_argument import find_run
from diloco_cli.errors import UsageError


def bucket_policy(
    run: str = typer.Argument(..., metavar="RUN", help="The run's bucket URL (it need not exist yet), or its name."),
    role: str = typer.Argument(..., metavar="ROLE", help="learner, syncer, operator or reader."),
    name: str = typer.Option("", "--name", help="The learner that the policy is for."),
    project: str = typer.Option("", "--project", help="gs://: the project that has the custom roles."),
    member: str = typer.Option("", "--member", help="gs://: who gets the role, such as serviceAccount:NAME."),
) -> None:
    """Print what a role may do in a run's bucket, as a policy for the cloud."""
    from diloco_cli.launch.bucket_policy import Role, policy_of

    if role not in get_args(Role):
        raise UsageError(f"no role {role!a}; there are: {', '.join(get_args(Role))}")
    print(policy_of(find_run(run).url, cast("Role", role), name, project, member), end="")
