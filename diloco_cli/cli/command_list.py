"""The commands in the order in which a user meets them, each with a line and examples: `diloco --help` needs no more.

A command's own help is its docstring, in the module of its name; that is loaded only when the command is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """A command in the list of `diloco --help`; its own help ends with the examples."""

    summary: str
    examples: tuple[str, ...] = ()


BEGIN = {
    "init": Listed(
        "Write a run that trains on this machine, or files to edit.",
        ("diloco init", "diloco init fleet --for gcs"),
    ),
    "data": Listed(
        "Token shards of your own text, made and checked.",
        ("diloco data tokenize 'corpus/**/*.txt' -o tokens", "diloco data show gs://my-bucket/tokens --check"),
    ),
    "inventory": Listed("Measure this machine for an inventory.", ("diloco inventory probe -f run.yaml",)),
    "plan": Listed(
        "Islands, schedule and predictions for the hardware there is.",
        ("diloco plan -f run.yaml", "diloco plan inventory.yaml -f run.yaml -o fleet.plan.json"),
    ),
    "simulate": Listed(
        "What would happen, in virtual time.",
        ("diloco simulate run run.yaml --for 1h", "diloco simulate goodput --chips 300k --learners 4 --days 1"),
    ),
    "doctor": Listed("Prove a store before a run trusts it.", ("diloco doctor gs://my-bucket/runs",)),
}
TRAIN = {
    "launch": Listed(
        "Start a run and its units here, and watch them.",
        ("diloco launch run.yaml", "diloco launch run.yaml --set train.tokens=2M --detach"),
    ),
    "status": Listed("The run at a glance, from the bucket alone.", ("diloco status --watch", "diloco status my-run")),
    "logs": Listed("What the units of this machine printed.", ("diloco logs syncer --lines 50",)),
    "events": Listed("What happened, and by whom.", ("diloco events -f", "diloco events my-run --since 2h --json")),
    "stop": Listed("Stop a run cleanly, on all machines.", ("diloco stop my-run",)),
    "resume": Listed("Go on with a run from its bucket alone.", ("diloco resume gs://my-bucket/runs/my-run",)),
    "runs": Listed("The runs of this directory.", ("diloco runs --json",)),
}
RESULTS = {
    "export": Listed(
        "Write the parameters, as safetensors or for transformers.",
        ("diloco export my-run -o model.safetensors", "diloco export my-run --to hf -o my-model"),
    ),
    "generate": Listed(
        "Write text with the newest parameters.", ('diloco generate my-run --prompt "def main(" --tokens 200',)
    ),
    "evaluate": Listed(
        "The held-out loss of the newest parameters, or tasks.",
        ("diloco evaluate my-run", "diloco evaluate my-run --tasks hellaswag --limit 100"),
    ),
    "report": Listed(
        "A run as a page, a picture or a table to show.",
        ("diloco report my-run -o my-run.html", "diloco report my-run --format csv"),
    ),
    "wandb": Listed("Send a run to Weights & Biases.", ("diloco wandb my-run --project nano",)),
    "verify": Listed("Replay the log and compare every digest.", ("diloco verify my-run",)),
}
OPERATE = {
    "chaos": Listed(
        "Break a unit of a run on this machine, and heal it.",
        ("diloco chaos kill syncer", "diloco chaos pause iowa --for 10s"),
    ),
    "rollback": Listed("Go back to the parameters of an earlier commit.", ("diloco rollback my-run --to 400",)),
    "gc": Listed("Delete now what only older commits need.", ("diloco gc my-run --dry-run",)),
    "readmit": Listed("End a learner's quarantine.", ("diloco readmit iowa my-run",)),
    "config": Listed(
        "Settings of a run and their origin; JSON Schemas.",
        ("diloco config show -f run.yaml --origin", "diloco config schema status"),
    ),
    "key": Listed("Keys of a signed run.", ("diloco key new run.key",)),
    "bucket-policy": Listed(
        "A bucket policy for one role of a run.",
        ("diloco bucket-policy gs://my-bucket/runs/my-run learner --name iowa",),
    ),
}
DAEMONS = {
    "learner": Listed("One island's learner.", ("diloco learner --run gs://my-bucket/runs/my-run --name iowa",)),
    "syncer": Listed("The syncer: merges offers and writes the log.", ("diloco syncer gs://my-bucket/runs/my-run",)),
}
GROUPS = {
    "Begin": BEGIN,
    "Train": TRAIN,
    "Results": RESULTS,
    "Operate": OPERATE,
    "Daemons, which launch starts": DAEMONS,
}
HIDDEN = ("evaluator",)
COMMANDS = {name: listed for group in GROUPS.values() for name, listed in group.items()}
EPILOG = "\b\nFirst steps: diloco init, then diloco launch run.yaml\nMore of each, with examples: diloco COMMAND -h"
