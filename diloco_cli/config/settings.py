"""The typed form of run.yaml and inventory.yaml. Units are last in the names; defaults are the paper's values
(arXiv 2604.21428) where it states them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import Struct, field, structs

from diloco_cli.methods import CodecName, InnerName, OuterName

Arguments = dict[str, Any]
RESERVED_NAMES = ("syncer", "supervisor")  # of units that are no learners


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all settings: immutable values, whose unknown keys are errors."""


class ModelSettings(Settings, frozen=True):
    """A preset, a user's `module:function`, a Hugging Face name or folder, or (for `plan` and `simulate` alone) plain
    numbers. `sequence` may stand beside `huggingface` and `entrypoint`: tokens in a training sequence. `args` are an
    entrypoint's; in the format of a run with a Hugging Face model, the content of its config.json. `vocabulary`: of a
    preset that reads text; None: the 256 bytes. `weights`: of `huggingface`, whether the run begins with those beside
    the config; `revision`: of a name from the Hub, in its cache. `initial`: a safetensors file with whose values the
    run begins. `weights_digest` and `frozen_digest`: of the values with which the run begins, and of the parameters
    that are not trained; `launch` writes them into the run's format."""

    preset: str | None = None
    entrypoint: str | None = None
    huggingface: str | None = None
    weights: Literal["pretrained", "random"] | None = None
    revision: str | None = None
    initial: str | None = None
    weights_digest: str | None = None
    frozen_digest: str | None = None
    args: Arguments = field(default_factory=dict)
    parameters: int | None = None
    layers: int | None = None
    width: int | None = None
    sequence: int | None = None
    vocabulary: int | None = None

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
    """A preset, a user's `module:function`, token shards at a URL (`tokens`), or text files (`text`: a path or pattern)
    as bytes or by the `tokenizer` in a folder, or of a name on the Hub. `shards`: into how many streams it is divided
    for good; None: one for each island of the launch. Islands that are to join later need a stream of their own each.
    `held_out`: the share of own tokens that is never trained on. `cache_bytes`: of a bucket's shards, on this machine's
    disk. `args` are an entrypoint's; in the format of a run with own tokens, what their index says
    (tasks/data.py)."""

    preset: str | None = None
    entrypoint: str | None = None
    tokens: str | None = None
    text: str | None = None
    tokenizer: str | None = None
    args: Arguments = field(default_factory=dict)
    shards: int | None = None
    held_out: float = 0.01
    cache_bytes: int = 4_000_000_000

    @property
    def is_own(self) -> bool:
        """Whether it is token shards or text."""
        return bool(self.tokens or self.text)


class InnerSettings(Settings, frozen=True):
    """The optimizer inside a learner. `schedule`: of the learning rate over the run, after `warmup_steps` from zero:
    a cosine or a line to a tenth of the peak; constant; or wsd, constant but for the last `decay` of the run, a line to
    a tenth. `save_every` is in rounds: how often its moments go to the store."""

    name: InnerName = "adamw"
    lr: float = 3e-4
    warmup_steps: int = 100
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay: float = 0.2
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    save_every: int = 20


class TrainSettings(Settings, frozen=True):
    """`tokens`: merged tokens at which the run ends. `batch_tokens`: of one inner step of one learner.
    `micro_batch_tokens`: of one forward and backward pass on one device; the gradients of a batch's passes are added
    up. `auto`: what the device holds. `precision`: of the forward pass; `auto` is bf16 on CUDA devices that have it,
    else fp32. Parameters and moments stay float32. `sharding`: of an island's model over its ranks: a copy on each, or
    each tensor divided; `auto`: copies where they fit, as planned. `checkpointing`: of activations, which the backward
    pass computes again, block by block. `compile`: the model, by torch.compile."""

    tokens: int = 20_000_000_000
    batch_tokens: int = 524_288
    micro_batch_tokens: int | Literal["auto"] = "auto"
    seed: int = 0
    threads: int = 1
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    sharding: Literal["auto", "ddp", "fsdp"] = "auto"
    checkpointing: bool = False
    compile: bool = False
    inner: InnerSettings = field(default_factory=InnerSettings)


class GraceSettings(Settings, frozen=True):
    """gamma < 1: the share of the slack that the grace window may use (the paper's adaptive window)."""

    gamma: float = 0.5


class AgreementSettings(Settings, frozen=True):
    """For `mixing: adaptive`, mean cosines between the learners' deltas in one merge: from `rebase_from` on learners
    keep their progress in flight, below `replace_below` they drop it; in between they do as before."""

    rebase_from: float = 0.3
    replace_below: float = 0.2


class SyncSettings(Settings, frozen=True):
    """How fragments are exchanged. `every`: H, in steps of the fastest island; `overlap`: tau, in slots.

    `layout`: how tensors are dealt to fragments; `split_rows`: whether tensors larger than the ideal fragment are cut;
    `head_is_embedding`: whether an untied output head counts as one. `granularity`: what one norm of `rda` covers.
    `clip`: a delta longer than so many times what is usual (protocol/rules/norms.py) is scaled down to that.
    `max_share`: the most that one learner's tokens weigh, of 1.
    `mixing`: how a merged fragment that arrives replaces a learner's own parameters: `replace` drops them (the paper's
    alpha = 0), `blend` keeps a share of `blend` (alpha) of them, `rebase` puts the progress made in flight on top of
    the new version, `adaptive` rebases while the learners' deltas agree and replaces while they do not.
    `error_feedback`: the codec's rounding error is added to the next delta. `local_steps`: H_i by measured speed, or as
    planned.
    """

    every: int = 24
    fragments: int = 24
    overlap: int | Literal["auto"] = "auto"
    quorum: int = 1
    grace: GraceSettings = field(default_factory=GraceSettings)
    layout: Literal["balanced", "layers", "strided"] = "balanced"
    split_rows: bool = False
    head_is_embedding: bool = False
    merge: Literal["rda", "avg"] = "rda"
    embedding_merge: Literal["rda", "avg"] = "avg"
    granularity: Literal["fragment", "tensor", "row"] = "tensor"
    weight: Literal["tokens2/steps", "tokens"] = "tokens2/steps"
    clip: float | Literal["none"] = 2.0
    max_share: float | Literal["none"] = "none"
    codec: CodecName = "bf16"
    weights_codec: CodecName = "bf16"
    adoption: Literal["on_arrival", "at_tau"] = "on_arrival"
    mixing: Literal["replace", "blend", "rebase", "adaptive"] = "replace"
    blend: float = 0.5
    agreement: AgreementSettings = field(default_factory=AgreementSettings)
    error_feedback: bool = False
    local_steps: Literal["measured", "planned"] = "measured"
    staleness_rounds: int = 2
    drift_rounds: int = 4
    skip_after_s: float = 60.0


class OuterSettings(Settings, frozen=True):
    """The optimizer on the syncer: SGD, or SGD with Nesterov momentum (DiLoCo, arXiv 2311.08105)."""

    name: OuterName = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9


class ColdStartSettings(Settings, frozen=True):
    """The first `rounds` rounds (0: none are special). `learners`: so many islands, those planned as the fastest, train
    in them, and the others join later. `every`: H in them. `outer_lr`, `outer_momentum`: values of the first round,
    which move to those of `outer` in even steps. None: as in all other rounds."""

    rounds: int = 0
    learners: int | None = None
    every: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None


class SyncerSettings(Settings, frozen=True):
    """Standbys, which replace a syncer that falls silent. `standbys`: how many `launch` starts beside the syncer.
    `on_learners`: every learner's process hosts a standby, and no separate syncer is started. `takeover_s`: the silence
    before a takeover; `auto`: four planned slots, at least 15 s, and what a state of the largest fragment takes at
    50 MB/s, which the syncer moves in silence. Each standby waits up to half as long again."""

    standbys: int = 0
    on_learners: bool = False
    takeover_s: float | Literal["auto"] = "auto"


class RetentionSettings(Settings, frozen=True):
    """How much of the past stays in the bucket: the newest `rounds` can be replayed and rolled back to; older objects
    that nothing needs are deleted. `grace_s`: from that decision to the first deletion."""

    rounds: int | Literal["all"] = 64
    grace_s: float = 60.0


class EvaluationSettings(Settings, frozen=True):
    """The OUTER parameters are evaluated every `every` rounds, on a number of held-out sequences. `on_divergence`: what
    follows when that loss has jumped by more than `jump` (and by more than protocol/rules/divergence.py allows)."""

    every: int = 5
    sequences: int = 64
    on_divergence: Literal["rollback", "pause", "warn"] = "rollback"
    jump: float = 0.25


class RunSettings(Settings, frozen=True, eq=False):  # noqa: PLW1641 - no hash: `args` is a dict
    """run.yaml. `inventory` is a path relative to the run file. `consented`: this machine lets the code run that they
    name. It is a fact about this process and no setting: it is never written, never read, and never compared."""

    name: str
    version: int = 1
    inventory: str | None = None
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
    cold_start: ColdStartSettings = field(default_factory=ColdStartSettings)
    syncer: SyncerSettings = field(default_factory=SyncerSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    consented: ClassVar[bool] = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunSettings) and structs.astuple(self) == structs.astuple(other)

    def with_consent(self, given: bool) -> RunSettings:
        """The same settings; `given`: whether this machine lets the code run that they name."""
        cls = RunSettings if given else ForeignRunSettings
        return cls(**{name: getattr(self, name) for name in self.__struct_fields__})


class ForeignRunSettings(RunSettings, frozen=True, eq=False):
    """Settings out of a bucket, before this machine has consented to the code that they name (runtime/consent.py)."""

    consented: ClassVar[bool] = False


class Link(Settings, frozen=True):
    """An island's link to its bucket, in bits per second and seconds; None is unknown."""

    up_bps: float | None = None
    down_bps: float | None = None
    rtt_s: float | None = None
    emulate: bool = False


class Accelerators(Settings, frozen=True):
    """`H100-SXM:8` is Accelerators("H100-SXM", 8); also cpu:N and mps."""

    name: str
    count: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes of a node that has these, unless the inventory says otherwise."""
        return 1 if self.name.lower() == "cpu" else self.count


class IslandSettings(Settings, frozen=True):
    """One island: accelerators with fast links inside, and so one learner. `ranks`: its processes on each node; None:
    one for each accelerator, and one for all cores of a CPU."""

    name: str
    region: str
    accelerators: Accelerators
    infra: str = "local"
    hosts: tuple[str, ...] = ()
    nodes: int = 1
    link: Link = field(default_factory=Link)
    mtbf_s: float | None = None
    restart_s: float | None = None
    price_per_h: float = 0.0
    egress_per_gb: float = 0.0
    slowdown: float = 1.0
    batch_tokens: int | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    ranks: int | None = None

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * (self.ranks or self.accelerators.num_ranks)


class MachineSettings(Settings, frozen=True):
    """One entry of `machines:`: machines that are alike, not yet grouped into islands; `plan` forms those.

    Named by `hosts`, or (where a scheduler picks them) by `name` and how many: `nodes`. Accelerators, link, price
    (per hour), MTBF, restart and `tokens_per_s` are of ONE machine. `fabric`: machines that name the same one have
    fast links to one another and may become one island.
    """

    region: str
    accelerators: Accelerators
    hosts: tuple[str, ...] = ()
    name: str | None = None
    nodes: int = 1
    fabric: str | None = None
    infra: str = "local"
    link: Link = field(default_factory=Link)
    mtbf_s: float | None = None
    restart_s: float | None = None
    price_per_h: float = 0.0
    egress_per_gb: float = 0.0
    slowdown: float = 1.0
    batch_tokens: int | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None


class LocalMachine(Settings, frozen=True):
    """The machine that every island with `infra: local` on `cpu` shares.

    `crowding[k - 1]`: the speed of each of k processes that train at once, as a share of one's speed alone;
    measured by `diloco inventory probe`, empty if it never was. It never rises.
    """

    cores: int
    crowding: tuple[float, ...] = ()


class RegionSettings(Settings, frozen=True):
    """`store` is the bucket that learners of this region use; None is the home bucket. `egress_per_gb`: the price of a
    GB that leaves this region's bucket."""

    store: str | None = None
    egress_per_gb: float | None = None


class StoreSettings(Settings, frozen=True):
    """The home bucket and prefix: it holds the commit log. `link`: that of the syncer's machine to it;
    `connections`: how many calls the syncer makes at a time (None: as many as it may)."""

    url: str
    region: str | None = None
    link: Link = field(default_factory=Link)
    connections: int | None = None


class Device(Settings, frozen=True):
    """One accelerator: peak dense TFLOP/s (bf16, or fp16/fp32 where there is no bf16) and memory in GB.

    `memory_gb` None: shared with the host. `achievable`: share of the peak that large matrix products reach.
    `unit`: what one entry counts (chip, gpu, device). `check`: the figure is not from a primary source. `backend`: what
    torch calls devices of this kind; None: not known. Learners train on cpu, cuda and mps.
    """

    name: str
    memory_gb: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    fp32_tflops: float | None = None
    gbps: float | None = None
    achievable: float | None = None
    unit: str | None = None
    check: bool = False
    note: str | None = None
    backend: Literal["cpu", "cuda", "mps", "xla", "neuron", "hpu"] | None = None


class Inventory(Settings, frozen=True):
    """inventory.yaml: islands as given, machines of which `plan` forms more, or both."""

    store: StoreSettings
    islands: tuple[IslandSettings, ...] = ()
    version: int = 1
    regions: dict[str, RegionSettings] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    machines: tuple[MachineSettings, ...] = ()
    local: LocalMachine | None = None
