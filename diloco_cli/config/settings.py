"""The typed form of run.yaml and inventory.yaml: a line is a setting's type, bounds, unit, default and documentation.

Units are last in the names. Defaults are the paper's values (arXiv 2604.21428) where it states them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field, structs

from diloco_cli.config import hardware
from diloco_cli.config.fields import (
    Bandwidth,
    BelowOne,
    Count,
    CountOrNone,
    Digest,
    Duration,
    Egress,
    Entrypoint,
    LongDuration,
    Name,
    NotNegative,
    Positive,
    Price,
    Settings,
    Share,
    Size,
    Text,
    Whole,
    doc,
    form,
    matching,
    one_of,
)
from diloco_cli.config.models import DATA_PRESETS, MODEL_PRESETS
from diloco_cli.methods import CODECS, INNER_OPTIMIZERS, OUTER_OPTIMIZERS, CodecName, InnerName, OuterName, choices_text
from diloco_cli.store.port import MAX_CONNECTIONS

Arguments = dict[str, Any]
RESERVED_NAMES = ("syncer", "supervisor")  # of units that are no learners
MAX_FRAGMENTS = 4096
MAX_THREADS = 1024
MAX_SHARDS = 1 << 20
MAX_PARAMETERS_TRIED = 200_000_000  # above, building the model once more takes too long
MAX_STANDBYS = 16
MAX_VOCABULARY = 1 << 24
MAX_NODES = 100_000
MAX_CORES = 4096
MAX_RANKS = 1024  # of one node


class ModelSettings(Settings, frozen=True):
    """One of `preset`, `entrypoint`, `huggingface`, or (for `plan` and `simulate` alone) plain numbers."""

    HINT = (
        f"a model is one of: preset: {' | '.join(MODEL_PRESETS)}; entrypoint: module:function (and args);"
        " huggingface: NAME or folder; or parameters, layers, width, sequence (for `plan` and `simulate` alone)"
    )

    preset: Annotated[Annotated[str, one_of(MODEL_PRESETS)] | None, doc("a built-in model")] = None
    entrypoint: Annotated[Entrypoint | None, doc("a function of yours that builds the model")] = None
    huggingface: Annotated[Text | None, doc("a causal language model: a folder, or a name on the Hub")] = None
    weights: Annotated[
        Literal["pretrained", "random"] | None, doc("of huggingface: whether the run begins with its weights")
    ] = None
    revision: Annotated[Text | None, doc("of a name on the Hub: a branch, a tag or a commit in its cache")] = None
    initial: Annotated[Text | None, doc("a safetensors file with whose values the run begins")] = None
    weights_digest: Annotated[Digest | None, doc("of the values that the run begins with; launch writes it")] = None
    frozen_digest: Annotated[Digest | None, doc("of the parameters that are not trained; launch writes it")] = None
    args: Annotated[Arguments, doc("of the entrypoint; in a run with a Hugging Face model, its config.json")] = field(
        default_factory=dict
    )
    parameters: Annotated[Count | None, doc("plain numbers, for plan and simulate alone")] = None
    layers: Annotated[Whole | None, doc("plain numbers, for plan and simulate alone")] = None
    width: Annotated[Count | None, doc("plain numbers, for plan and simulate alone")] = None
    sequence: Annotated[Count | None, doc("tokens of a training sequence; beside huggingface and entrypoint, too")] = (
        None
    )
    vocabulary: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_VOCABULARY)] | None,
        doc("of a preset that reads text (null: the 256 bytes), or of plain numbers"),
    ] = None

    @property
    def is_built(self) -> bool:
        """Whether something here says how to build the model. If not, its tensors may still be known, by `initial`: for
        learners that bring the model in a loop of their own."""
        return bool(self.preset or self.entrypoint or self.huggingface)

    @property
    def brought(self) -> str | None:
        """The file or folder with whose values the run begins; None: with those that the model's own code makes."""
        return self.initial or (self.huggingface if self.weights == "pretrained" else None)


class DataSettings(Settings, frozen=True):
    """One of `preset`, `entrypoint`, `tokens` and `text`."""

    HINT = (
        f"data are one of: preset: {' | '.join(DATA_PRESETS)}; entrypoint: module:function (and args);"
        " tokens: URL or folder of token shards; text: 'FOLDER/**/*.txt' (and tokenizer: FOLDER or NAME)"
    )

    preset: Annotated[Annotated[str, one_of(DATA_PRESETS)] | None, doc("built-in data")] = None
    entrypoint: Annotated[Entrypoint | None, doc("a function of yours that builds the data")] = None
    tokens: Annotated[Text | None, doc("the URL or folder of token shards")] = None
    text: Annotated[Text | None, doc("a path or a pattern of text files")] = None
    tokenizer: Annotated[Text | None, doc("of text: a folder, or a name on the Hub; null: bytes")] = None
    args: Annotated[Arguments, doc("of the entrypoint; in a run with own tokens, what their index says")] = field(
        default_factory=dict
    )
    shards: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SHARDS)] | None,
        doc("streams into which the data are divided for good; null: one for each island of the launch"),
    ] = None
    held_out: Annotated[Share, doc("share of own tokens that is never trained on")] = 0.01
    cache_bytes: Annotated[Size, doc("of a bucket's token shards, on this machine's disk")] = 4_000_000_000

    @property
    def is_own(self) -> bool:
        """Whether it is token shards or text."""
        return bool(self.tokens or self.text)


class InnerSettings(Settings, frozen=True):
    """The optimizer inside a learner."""

    name: Annotated[InnerName, doc(choices_text(INNER_OPTIMIZERS))] = "adamw"
    lr: Annotated[Positive, doc("the largest learning rate")] = 3e-4
    warmup_steps: Annotated[CountOrNone, doc("steps in which the learning rate grows from zero")] = 100
    schedule: Annotated[
        Literal["cosine", "linear", "wsd", "constant"],
        doc(
            "of the learning rate: cosine | linear, to a tenth | constant | wsd: constant, then a fall to a tenth over"
            " the last share of the run, decay: 0.2"
        ),
    ] = "cosine"
    decay: Annotated[Share, doc("of wsd: the share of the run in which the learning rate falls")] = 0.2
    weight_decay: Annotated[NotNegative, doc("share of a parameter that each step takes away, times lr")] = 0.1
    beta1: Annotated[BelowOne, doc("of adamw, and of what muon leaves to it")] = 0.9
    beta2: Annotated[BelowOne, doc("of the same")] = 0.95
    clip_norm: Annotated[NotNegative, doc("the longest that the gradients of one step count; 0: any length")] = 1.0
    save_every: Annotated[Whole, doc("rounds between two saves of the optimizer's state")] = 20


class TrainSettings(Settings, frozen=True):
    """Parameters and moments are float32, whatever the precision."""

    tokens: Annotated[Count, doc("merged tokens at which the run ends")] = 20_000_000_000
    batch_tokens: Annotated[Count, doc("of one inner step of one island, unless the inventory says otherwise")] = (
        524_288
    )
    micro_batch_tokens: Annotated[
        Count | Literal["auto"],
        doc(
            "of one forward and backward pass on one device; gradients are added up. auto: what its memory holds, or"
            " whole sequences: 65536"
        ),
    ] = "auto"
    seed: Annotated[Annotated[int, Meta(ge=0, le=2**32 - 1)], doc("of the initial values and the data's order")] = 0
    threads: Annotated[Annotated[int, Meta(ge=1, le=MAX_THREADS)], doc("per learner on CPUs")] = 1
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], doc("of the forward pass: auto | fp32 | bf16; auto: bf16 on CUDA, else fp32")
    ] = "auto"
    sharding: Annotated[
        Literal["auto", "ddp", "fsdp"],
        doc("of the model over an island's ranks: auto | ddp (a copy on each) | fsdp (each tensor divided)"),
    ] = "auto"
    checkpointing: Annotated[bool, doc("true: the backward pass computes activations again, block by block")] = False
    compile: Annotated[bool, doc("true: by torch.compile")] = False
    inner: InnerSettings = InnerSettings()


class GraceSettings(Settings, frozen=True):
    """The paper's adaptive grace window."""

    gamma: Annotated[Share, doc("share of the slack that a merge waits for the others, at most one slot; below 1")] = (
        0.5
    )


class SyncSettings(Settings, frozen=True):
    """How fragments are exchanged."""

    every: Annotated[Count, doc("H: steps of the fastest island between two exchanges of a fragment")] = 24
    fragments: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_FRAGMENTS)], doc("P: parts of the model that travel one after the other")
    ] = 24
    overlap: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto"],
        doc("tau: slots that an exchange may take; auto: from the links"),
    ] = "auto"
    quorum: Annotated[Whole, doc("K: islands that must have come before a merge")] = 1
    grace: GraceSettings = GraceSettings()
    merge: Annotated[
        Literal["rda", "avg"], doc("rda (radial-directional averaging, of the paper) | avg (weighted mean)")
    ] = "rda"
    clip: Annotated[
        Annotated[float, Meta(ge=1)] | Literal["none"],
        doc("or none: a delta longer than so many times what is usual is scaled down to that"),
    ] = 2.0
    codec: Annotated[CodecName, doc(f"of what is sent up; {choices_text(CODECS)}")] = "bf16"
    weights_codec: Annotated[CodecName, doc("of what comes back; the same codecs")] = "bf16"
    mixing: Annotated[
        Literal["replace", "rebase"],
        doc(
            "when a merged fragment comes back: replace (drop what was learned while it was in flight) | rebase (keep"
            " that)"
        ),
    ] = "replace"
    error_feedback: Annotated[bool, doc("true: what codec rounds away is added to the next delta; for int8, int4")] = (
        False
    )
    local_steps: Annotated[
        Literal["measured", "planned"], doc("steps of each island in a round, by its speed: measured | planned")
    ] = "measured"
    staleness_rounds: Annotated[Whole, doc("an offer is refused if its base was replaced more rounds ago")] = 2
    drift_rounds: Annotated[Whole, doc("a learner pauses after so many rounds without a merge")] = 4
    skip_after_s: Annotated[
        LongDuration,
        doc("a slot without a quorum is skipped, if later ones have offers, after this long, or four slots if longer"),
    ] = 60.0

    @property
    def keeps_progress(self) -> bool:
        """Then a learner must remember the parameters that it sent."""
        return self.mixing == "rebase"


class OuterSettings(Settings, frozen=True):
    """The optimizer on the syncer: SGD, or SGD with Nesterov momentum (DiLoCo, arXiv 2311.08105)."""

    AUTO: ClassVar = ("lr", "momentum")

    name: Annotated[OuterName, doc(choices_text(OUTER_OPTIMIZERS))] = "nesterov"
    lr: Annotated[
        Positive | Literal["auto"],
        doc("share of the mean delta that a merge applies; outer: auto sets both by train.inner and the run's rounds"),
    ] = 0.7
    momentum: Annotated[BelowOne | Literal["auto"], doc("of nesterov; short runs want less, for example 0.5")] = 0.9


class ColdStartSettings(Settings, frozen=True):
    """A lone start: models that are hardly trained move fast and apart, and an average of them loses most of that."""

    rounds: Annotated[
        Annotated[int, Meta(ge=0)],
        doc("so many first rounds train the fastest island alone, and the others join later; 0: all train at once"),
    ] = 0


class SyncerSettings(Settings, frozen=True):
    """Standbys, which replace a syncer that falls silent. Each waits up to half as long again as `takeover_s`."""

    standbys: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_STANDBYS)],
        doc("further syncers that launch starts; they wait, and take over from a silent one"),
    ] = 0
    on_learners: Annotated[bool, doc("true: every learner hosts a standby, and launch starts no syncer of its own")] = (
        False
    )
    takeover_s: Annotated[
        LongDuration | Literal["auto"],
        doc(
            "how long a silence is: 6 s and more, or auto (four planned slots, at least 15 s, and what the largest"
            " fragment takes at 50 MB/s)"
        ),
    ] = "auto"


class RetentionSettings(Settings, frozen=True):
    """How much of the past stays in the bucket."""

    rounds: Annotated[
        Whole | Literal["all"], doc("so much of the past stays to go back to and to verify; all: everything")
    ] = 64
    grace_s: Annotated[Duration, doc("for readers on their way, before what lies behind is deleted")] = 60.0


class EvaluationSettings(Settings, frozen=True):
    """Of the merged model, on held-out sequences."""

    every: Annotated[Whole, doc("rounds between two evaluations of the merged model")] = 5
    sequences: Annotated[Whole, doc("held-out sequences of one evaluation")] = 64
    on_divergence: Annotated[
        Literal["rollback", "pause", "warn"],
        doc(
            "when the loss jumps: rollback (to the last good commit; a learner that alone caused it is held back; if"
            " none did, the run pauses) | pause (the run stops and says how to go on) | warn (status and the syncer's"
            " log say it)"
        ),
    ] = "rollback"
    jump: Annotated[
        Positive,
        doc("nats above the best of the last 5; always allowed: 10 %, and three times their usual change"),
    ] = 0.25


class RunSettings(Settings, frozen=True, eq=False):  # noqa: PLW1641 - no hash: `args` is a dict
    """run.yaml. `consented`: this machine lets the code run that they name. It is a fact about this process and no
    setting: it is never written, never read, and never compared."""

    name: Annotated[Name, doc("becomes part of the bucket's keys")]
    version: Annotated[int, doc("of this file's format")] = 1
    inventory: Annotated[Text | None, doc("a path, relative to this file")] = None
    model: Annotated[
        ModelSettings,
        doc(
            f"A preset: {', '.join(MODEL_PRESETS)}. Those that read text take vocabulary: 50257 (without it, 256: the"
            " bytes). Your own: {entrypoint: my_package.model:build, args: {depth: 12}}. A causal language model of"
            " Hugging Face: {huggingface: NAME_OR_FOLDER, weights: pretrained, sequence: 1024} (or random), with pip"
            " install 'diloco[hf]'. `initial: FILE.safetensors` beside any of these: the run begins with what `diloco"
            " export` wrote. For `plan` alone, plain numbers: {parameters: 1.0B, layers: 16, width: 2048, sequence:"
            " 2048}."
        ),
    ] = ModelSettings()
    data: Annotated[
        DataSettings,
        doc(
            "python-stdlib: the source of Python's standard library as bytes, on every machine without a download."
            " digits: scikit-learn's images, for vit-nano, with pip install 'diloco[vision]'. Your own text: {text:"
            ' "corpus/**/*.txt"} as bytes, or with tokenizer: FOLDER; token shards that `diloco data tokenize` made:'
            " {tokens: gs://my-bucket/tokens, held_out: 0.01, cache: 4 GB}. Anything else: {entrypoint:"
            " my_package.data:build}. Islands that are to join while the run goes need data of their own: {preset: ...,"
            " shards: 16} is for 16 in all."
        ),
    ] = DataSettings()
    train: TrainSettings = TrainSettings()
    sync: SyncSettings = SyncSettings()
    outer: OuterSettings = OuterSettings()
    cold_start: ColdStartSettings = ColdStartSettings()
    syncer: SyncerSettings = SyncerSettings()
    retention: RetentionSettings = RetentionSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    consented: ClassVar[bool] = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunSettings) and structs.astuple(self) == structs.astuple(other)

    def is_worth_a_try(self, num_parameters: float) -> bool:
        """Whether first steps are made on a copy: presets are known to fit; a user's model or data is tried if it is
        small enough."""
        brought = self.model.entrypoint or self.model.huggingface or self.data.entrypoint or self.model.brought
        return self.model.is_built and bool(brought) and num_parameters <= MAX_PARAMETERS_TRIED

    def with_consent(self, given: bool) -> RunSettings:
        """The same settings; `given`: whether this machine lets the code run that they name."""
        cls = RunSettings if given else ForeignRunSettings
        return cls(**{name: getattr(self, name) for name in self.__struct_fields__})


class ForeignRunSettings(RunSettings, frozen=True, eq=False):
    """Settings out of a bucket, before this machine has consented to the code that they name (runtime/consent.py)."""

    consented: ClassVar[bool] = False


class Link(Settings, frozen=True):
    """Of an island to its bucket; None is unknown."""

    up_bps: Annotated[Bandwidth | None, doc("from the island to its bucket")] = None
    down_bps: Annotated[Bandwidth | None, doc("from its bucket to the island")] = None
    rtt_s: Annotated[Duration | None, doc("of one request")] = None
    emulate: Annotated[bool, doc("true: the island's processes are slowed to this link")] = False


Hosts = Annotated[tuple[str, ...], form(hardware.read_hosts, hardware.HOSTS)]
Installed = Annotated[hardware.Accelerators, form(hardware.read_accelerators, hardware.ACCELERATORS)]
Infra = Annotated[str, form(hardware.read_infra, {"type": "string"})]
Slowdown = Annotated[float, form(hardware.read_slowdown, hardware.EMULATE, key="emulate")]
Options = Annotated[dict[str, Any], form(hardware.read_options, {"type": "object"})]
FabricName = Annotated[
    str, matching(hardware.FABRIC, "one word for an interconnect, such as pod-a", ["string", "integer"])
]
Host = Annotated[str, matching(r"^[A-Za-z0-9.:-]+$", "a host name or address")]
Fabric = Annotated[hardware.Fabric, form(hardware.read_fabric, hardware.FABRIC_FORM)]
StoreURL = Annotated[str, form(hardware.read_store_url, {"type": "string"})]
Nodes = Annotated[int, Meta(ge=1, le=MAX_NODES)]


class IslandSettings(Settings, frozen=True):
    """One island: accelerators with fast links inside, and so one learner. Prices and failures are the whole
    island's."""

    name: Annotated[Name, doc("the island's, and its learner's")]
    region: Annotated[Name, doc("whose bucket it uses")]
    accelerators: Annotated[Installed, doc("NAME:COUNT of each node")]
    infra: Annotated[Infra, doc("what starts its processes")] = "local"
    hosts: Annotated[Hosts, doc("one node each")] = ()
    nodes: Annotated[Nodes, doc("how many nodes it has, all alike")] = 1
    fabric: Annotated[
        Fabric | None, doc("what joins them: {gbps: 400} | ethernet, or within one node nvlink | pcie; null: as usual")
    ] = None
    link: Link = Link()
    mtbf_s: Annotated[LongDuration | None, doc("mean time between its failures")] = None
    restart_s: Annotated[LongDuration | None, doc("from a failure to its next useful step")] = None
    price_per_h: Annotated[Price, doc("of an hour")] = 0.0
    egress_per_gb: Annotated[Egress | None, doc("of what leaves its region; null: its region's")] = None
    slowdown: Annotated[Slowdown, doc("its steps take so many times longer, to try things out")] = 1.0
    batch_tokens: Annotated[Count | None, doc("of one of its steps; null: train.batch_tokens")] = None
    mfu: Annotated[Share | None, doc("share of the peak that training reaches")] = None
    tokens_per_s: Annotated[Positive | None, doc("measured; replaces mfu")] = None
    ranks: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_RANKS)] | None,
        doc("its processes on each node; null: one for each accelerator, and one for all cores of a CPU"),
    ] = None

    @property
    def starts_by(self) -> str:
        """`infra`, with the host where that is one of ssh."""
        return f"ssh/{self.hosts[0]}" if self.infra == "ssh" and len(self.hosts) == 1 else self.infra

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * (self.ranks or self.accelerators.num_ranks)


class MachineSettings(Settings, frozen=True):
    """One entry of `machines:`: machines that are alike, not yet grouped into islands; `plan` forms those.

    Named by `hosts`, or (where a scheduler picks them) by `name` and how many: `nodes`. Accelerators, link, price,
    MTBF, restart and `tokens_per_s` are of ONE machine.
    """

    region: Annotated[Name, doc("whose bucket they use")]
    accelerators: Annotated[Installed, doc("NAME:COUNT of each machine")]
    hosts: Annotated[Hosts, doc("one machine each")] = ()
    name: Annotated[Name | None, doc("where a scheduler picks the machines")] = None
    nodes: Annotated[Nodes, doc("how many machines")] = 1
    fabric: Annotated[FabricName | None, doc("machines that name the same one may become one island")] = None
    infra: Annotated[Infra, doc("what starts their processes")] = "local"
    link: Link = Link()
    mtbf_s: Annotated[LongDuration | None, doc("mean time between failures of one machine")] = None
    restart_s: Annotated[LongDuration | None, doc("from a failure to its next useful step")] = None
    price_per_h: Annotated[Price, doc("of an hour of one machine")] = 0.0
    egress_per_gb: Annotated[Egress | None, doc("of what leaves its region; null: its region's")] = None
    slowdown: Annotated[Slowdown, doc("its steps take so many times longer, to try things out")] = 1.0
    batch_tokens: Annotated[Count | None, doc("of one step of its island; null: train.batch_tokens")] = None
    mfu: Annotated[Share | None, doc("share of the peak that training reaches")] = None
    tokens_per_s: Annotated[Positive | None, doc("measured, of one machine; replaces mfu")] = None


class Site(Settings, frozen=True):
    """What a name means in `infra: ENGINE/NAME`, where jobs are submitted. Nothing of it goes into a bucket."""

    engine: hardware.EngineKind
    via: Annotated[Annotated[str, matching(hardware.VIA, "`ssh HOST`")] | None, doc("where its commands run")] = None
    directory: Annotated[Text | None, doc("of the jobs there; all nodes see it")] = None
    setup: Annotated[Text | None, doc("a line of shell before `diloco`")] = None
    install: Annotated[
        Annotated[str, matching(hardware.WHEEL, "wheel, or wheel[EXTRA,...]")] | None,
        doc("wheel, or wheel[hf]: `launch` brings diloco there, and pip its dependencies; null: it is there"),
    ] = None
    account: Annotated[Text | None, doc("to which Slurm counts the jobs")] = None
    image: Annotated[Text | None, doc("of Kubernetes' pods")] = None
    context: Annotated[Text | None, doc("of kubectl; null: the site's name")] = None
    options: Annotated[Options, doc("of the engine: those of sbatch by their long names")] = field(default_factory=dict)

    @property
    def host(self) -> str | None:
        return None if self.via is None else self.via.split()[1]


class LocalMachine(Settings, frozen=True):
    """The machine that every island with `infra: local` on `cpu` shares."""

    cores: Annotated[int, Meta(ge=1, le=MAX_CORES)]


class RegionSettings(Settings, frozen=True):
    """A region in which islands lie."""

    store: Annotated[StoreURL | None, doc("the bucket of its learners; null: the home bucket")] = None
    egress_per_gb: Annotated[Egress | None, doc("of what leaves this bucket's region")] = None


class StoreSettings(Settings, frozen=True):
    """The home bucket and prefix: it holds the commit log."""

    url: StoreURL
    region: Annotated[Name | None, doc("in which the bucket lies")] = None
    link: Annotated[Link, doc("of the syncer's machine to the bucket")] = Link()
    connections: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)] | None,
        doc("calls of the syncer at a time; null: as many as it may"),
    ] = None
    allow_http: Annotated[Host | None, doc("host on a network of your own that has no https; it sees all")] = None


class Inventory(Settings, frozen=True):
    """inventory.yaml: islands as given, machines of which `plan` forms more, or both."""

    store: StoreSettings
    islands: tuple[IslandSettings, ...] = ()
    version: int = 1
    regions: dict[str, RegionSettings] = field(default_factory=dict)
    devices: dict[str, hardware.Device] = field(default_factory=dict)
    machines: tuple[MachineSettings, ...] = ()
    local: LocalMachine | None = None
    sites: dict[str, Site] = field(default_factory=dict)

    @property
    def sites_by_infra(self) -> dict[str, Site]:
        """As `infra` names them."""
        return {f"{site.engine}/{name}": site for name, site in self.sites.items()}
