"""The schema of a run, and the one place where YAML becomes dataclasses.

Precedence: defaults < extended files < file < command line (`key=value`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.config_checks import check
from agentrl.config_checks import get as get
from agentrl.config_cluster import ClusterConfig
from agentrl.config_engine import EngineConfig as EngineConfig
from agentrl.config_layers import laid_over, read, refuse_unknown
from agentrl.errors import ConfigError

SITES_OWN = ("cluster.environment", "engine.sglang.environment")
"""Sections whose keys are not ours to name."""


@dataclass
class ModelConfig:
    path: str = "data/demo/model"
    """Folder of the starting model, in Hugging Face's layout (config, safetensors, tokenizer)."""
    init: str = "none"
    """`none`: the folder must exist. `qwen3`: `prepare` makes a random one, with a tokenizer."""
    hidden_size: int = 128
    """Width of a model made by `init`."""
    intermediate_size: int = 256
    """Width of its feed-forward layers."""
    layers: int = 4
    """Number of its layers."""
    heads: int = 4
    """Number of its attention heads; key-value heads are half as many."""
    head_dim: int = 32
    """Width of one of its heads."""
    vocab_size: int = 512
    """Upper bound on the tokens of its byte-level BPE tokenizer."""


@dataclass
class TasksConfig:
    source: str = "repair"
    """`repair`: made by the seeded generator. `swesmith`, `swebench` (its kin too), `r2egym`: rows
    of that schema, a JSONL or Parquet file a split. `harbor`: task folders in a folder a split."""
    folder: str = "data/demo/tasks"
    """Where the split files (train.jsonl, held_out.jsonl, …) and the prepared images are."""
    dataset: str = ""
    """Rows of a split that is not in the folder are fetched from there, once, by `datasets`: a name
    on its hub as SWE-bench/SWE-bench_Verified, or a folder."""
    train: int = 1500
    """Number of training instances that the generator makes."""
    held_out: int = 250
    """Instances with identifiers, constants and (function, site, replacement) never trained on."""
    unseen_sites: int = 60
    """Instances at bug sites never trained on."""
    unseen_functions: int = 60
    """Instances of functions never trained on."""
    functions: int = 0
    """Functions that bugs are planted in, the same number from each of the library's modules or one
    fewer; 0 takes all. The fewer they are, the sooner reinforcement learning knows each."""
    max_functions: int = 1
    """Functions in one generated module, 1 or more."""
    seed: int = 0
    """Seed of the generator and of the splits."""
    grade_timeout_s: float = 30.0
    """Longest a task's tests may run when graded, seconds."""
    test_setup: str = ""
    """Shell text before each row's test command, as `. /opt/miniconda3/bin/activate testbed`."""
    fresh_verifier: bool = True
    """Harbor's verifiers judge the changes of the repository, in a fresh sandbox; false: in the
    agent's own, as Harbor does, where it can also have changed what judges it."""
    environment: str = ""
    """What a row's image is to sandbox.kind: `docker://{image}` (apptainer), `{image}` (docker);
    empty: rows' images are not used, and each task's repository is made from its clone."""
    subset: int = 0
    """Tasks of a split that are taken, by repository and difficulty, by tasks.seed; 0: all."""


@dataclass
class SandboxConfig:
    kind: str = "bubblewrap"
    """`bubblewrap`, `apptainer`, `docker`, `e2b`; or `process`, which isolates NOTHING."""
    environment: str = ""
    """What a task that names none starts from: a SIF, an unpacked root folder or `docker://…`
    (`apptainer`), an image's reference (`docker`), a template (`e2b`)."""
    scratch: str = ""
    """Node-local folder for what a sandbox without memory of its own writes; else $TMPDIR."""
    shell: str = "bash"
    """Runs the commands: `bash`, or `sh`, which on Debian starts in a third of the time."""
    memory_mb: int = 512
    """Address space of one process in a sandbox, MiB."""
    total_memory_mb: int = 2048
    """Memory of all processes of one sandbox together, MiB; watched: for a moment it is passed."""
    cpu_s: int = 60
    """CPU time of one process in a sandbox, seconds."""
    processes: int = 64
    """Processes and threads that one sandbox may hold at once."""
    file_mb: int = 64
    """Largest file that a process in a sandbox may write, MiB."""
    disk_mb: int = 256
    """Bytes that one sandbox may write in all, MiB."""
    start_timeout_s: float = 30.0
    """Longest that creating and booting one sandbox may take, seconds."""
    max_starts: int = 4
    """Sandboxes that start at the same time."""
    starts_per_s: float = 0.0
    """Starts that begin in a second, once they have a slot; 0 is no bound."""
    start_jitter_s: float = 0.0
    """Longest random wait before a start, seconds: starts that were ready together spread out."""
    warm: int = 0
    """Most sandboxes kept ready unasked; how many follows from how often an image is asked for and
    how long a start takes."""
    images: str = ""
    """Folder, shared by the nodes, of what is made from `docker://` environments, once for all of
    them: SIFs (`apptainer`), names of templates (`e2b`)."""
    pull_timeout_s: float = 1800.0
    """Longest that bringing one image here may take, seconds; not part of a start's time."""
    lease_s: float = 300.0
    """A sandbox of `e2b` lives this long beyond its owner's last sign, seconds."""
    e2b_domain: str = ""
    """Domain of a self-hosted E2B; empty: the SDK's own, or E2B_DOMAIN. Keys: E2B_API_KEY."""


@dataclass
class AgentConfig:
    prompts: str = "configs/agents/repair.yaml"
    """mini-swe-agent YAML whose prompts, templates and limits are used as they are."""
    mode: str = "text"
    """`tool`: calls of the tool `bash`. `text`: one fenced block a reply."""
    max_turns: int = 3
    """Model calls in a trajectory."""
    tokens_per_turn: int = 64
    """Longest reply, tokens."""
    tokens_per_trajectory: int = 512
    """Longest context of a trajectory, tokens, prompt included."""
    max_malformed: int = 3
    """Malformed replies in a row that end a trajectory."""
    temperature: float = 1.0
    """Sampling temperature. The trainer divides its logits by the same number."""
    observation_bytes: int = 10000
    """Output kept of one command, bytes: head and tail, the middle elided."""
    command_timeout_s: float = 10.0
    """Longest that one command may run, seconds."""
    turn_timeout_s: float = 60.0
    """Longest that one turn (a model call and its commands) may take, seconds."""
    trajectory_timeout_s: float = 300.0
    """Longest that one trajectory may take, seconds."""


@dataclass
class RolloutConfig:
    nodes: int = 1
    """Inference nodes."""
    workers: int = 1
    """Worker processes on each inference node."""
    concurrency: int = 64
    """Trajectories in flight in one worker process."""
    attempts_per_task: int = 8
    """Trajectories of one draw: the group that advantages compare."""
    max_staleness: int = 1
    """Steps that a draw may be started ahead of the trainer."""
    group_timeout_s: float = 900.0
    """Longest that one group may take, seconds."""
    retries: int = 2
    """Times that one trajectory is tried again after an infrastructure failure."""
    min_group: int = 2
    """Graded trajectories without which a group is dropped, and counted."""
    max_infra_rate: float = 0.5
    """Share of infrastructure failures among the newest `infra_window` tries that ends the run."""
    infra_window: int = 40
    """Tries over which that share is taken."""
    take_patches: bool = True
    """Record what each training attempt changed; one more command each. Evaluation always does."""


@dataclass
class TrainingConfig:
    steps: int = 100
    """Optimizer steps of the run."""
    groups_per_step: int = 8
    """Groups that one step consumes, those without signal included."""
    lr: float = 3e-4
    """Learning rate of Adam."""
    warmup_steps: int = 5
    """Steps over which the learning rate rises to `lr`."""
    lr_decay: str = "none"
    """`linear`: after its rise the learning rate falls to nothing at the end of `steps`. `none`."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta1: float = 0.9
    """Adam's first decay."""
    beta2: float = 0.98
    """Adam's second decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    clip_low: float = 0.2
    """Lower clip of the policy ratio: 1 − clip_low."""
    clip_high: float = 0.28
    """Upper clip of the policy ratio: 1 + clip_high."""
    std_normalize: bool = True
    """Divide a group's advantages by their standard deviation."""
    importance_cap: float = 2.0
    """Cap of the truncated weight between trainer and engine; 0 switches it off."""
    kl_coef: float = 0.0
    """Weight of the KL term against the starting model; 0 switches it off."""
    kl_estimator: str = "k3"
    """As a loss: `k2` has the gradient of KL(π‖start), `k3` of KL(start‖π); `k1` none, refused."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 switches it off."""
    router_balance_coef: float = 0.0
    """Weight of the loss that evens out a mixture's experts, in SFT as well; 0 switches it off."""
    aggregation: str = "token"
    """`token`: mean over the step's tokens. `trajectory`: mean of the trajectories' means."""
    micro_batch_tokens: int = 4096
    """Token budget of one packed micro-batch."""
    packing: str = "padded"
    """`padded`: rows of like length side by side. `packed`: end to end in one row, no padding."""
    device: str = "cpu"
    """`cpu`, or `gpu`: CUDA or ROCm, whichever torch was built for."""
    ranks: int = 1
    """Processes of the trainer, one a GPU; FSDP2 cuts parameters and optimizer over them."""
    share_gpus: bool = False
    """Put several ranks on a GPU where there are fewer: to try a cut out, at a crawl."""
    backend: str = "torch"
    """`torch`: a transformers model, FSDP2. `megatron`: megatron-core, cut as the next keys say."""
    megatron_layers: str = "local"
    """`local`: without Transformer Engine, on CUDA and ROCm. `te`: Megatron's own, on it."""
    tensor_parallel: int = 1
    """Megatron: ranks that share each layer's matrices out, and its activations between them."""
    expert_parallel: int = 1
    """Megatron: ranks that share out the experts of each layer."""
    pipeline_parallel: int = 1
    """Megatron: stages of equally many layers, through which micro-batches go one after another."""
    context_parallel: int = 1
    """Ranks that share one sequence out. More than 1 is refused."""
    recompute: str = "none"
    """`layers`: keep a layer's input only, and compute the layer again in backward. `none`."""
    compile: bool = False
    """Let torch.compile fuse each decoder layer; pays on a GPU, after a minute's start."""
    head_tiles_from: int = 32768
    """Vocabulary from which logits are made and used tile by tile, never whole; 0: always whole."""
    threads: int = 1
    """Torch threads of the trainer on a CPU."""
    checkpoint_every: int = 20
    """Steps between checkpoints."""
    checkpoint_in_background: bool = False
    """Train on while threads write a checkpoint; its copy takes the CPU's memory meanwhile."""
    checkpoint_timeout_s: float = 1800.0
    """Longest that writing one may take, seconds, the ranks' shares and the rest each."""
    max_trained_staleness: int = 4
    """Versions between a group's oldest token and the trainer beyond which it is filtered."""
    keep_checkpoints: int = 2
    """Verified checkpoints kept."""
    keep_versions: int = 3
    """Published weight versions kept; a leased one stays."""
    wait_timeout_s: float = 900.0
    """Longest that a step may wait for groups, seconds."""
    dtype: str = "float32"
    """`float32` or `bfloat16`."""


@dataclass
class SftConfig:
    traces: int = 3000
    """Expert traces to make."""
    expert_accuracy: float = 0.15
    """Chance that the scripted expert's try is the right one; else it is a plausible wrong one."""
    epochs: int = 2
    """Passes over the traces."""
    batch: int = 8
    """Traces in one step."""
    lr: float = 3e-3
    """Learning rate of Adam (embeddings, norms)."""
    muon_lr: float = 0.01
    """Learning rate of Muon (matrices), on one CPU process; 0 gives them to Adam, as on GPUs."""
    context_weight: float = 0.3
    """Weight of the loss on tokens that the assistant did not write; 0 leaves them out."""
    threads: int = 1
    """Torch threads."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""


@dataclass
class EvaluationConfig:
    split: str = "held_out"
    """Split of the tasks to evaluate."""
    attempts: int = 4
    """Attempts at each task."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    tasks: int = 0
    """Tasks to take, the first of the split; 0 takes all."""
    bootstrap: int = 2000
    """Bootstrap samples of the 95 % interval."""


@dataclass
class RunConfig:
    name: str = "demo"
    """Name of the run, and of its folder."""
    runs_dir: str = "runs"
    """Folder that holds the run directories, on a filesystem that all nodes share."""
    seed: int = 0
    """Seed of everything but the tasks."""
    image: str = ""
    """Apptainer image (SIF) that every role runs in, on a cluster; empty: the Python that asks."""
    handoff: str = "files"
    """How groups reach the trainer: `files`, the shared spool; or `socket`, acknowledged ZeroMQ."""
    weights: str = "disk"
    """How versions reach the engines: `disk`; or `collective`, over NCCL or gloo, disk behind."""
    push_timeout_s: float = 60.0
    """Longest that engines and trainer wait for each other in a collective push, seconds."""
    push_bucket_mb: int = 512
    """Tensors sent in one request of a collective push, MiB."""
    max_attempts_without_progress: int = 3
    """Launch attempts without a new checkpoint after which the run stops."""
    grace_s: float = 30.0
    """Seconds that a role has to save and leave once asked to stop."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path` with what it extends, lay `overrides` over it, check it whole."""
    return resolve(laid_over(read(Path(path)), overrides), f"{path}")


def resolve(chosen: DictConfig, where: str) -> RunConfig:
    """Lay `chosen` over the schema. Raises ConfigError; an unknown key names its neighbours."""
    refuse_unknown(OmegaConf.to_container(chosen), known_keys(), where, free=SITES_OWN)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), chosen)
        config = cast(RunConfig, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{where}: {str(error).splitlines()[0]} (key {error.full_key})"
        ) from error
    check(config)
    return config


def save(config: RunConfig, path: Path) -> None:
    """Write the whole resolved config as YAML."""
    path.write_text(to_yaml(config))


def to_yaml(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def known_keys(kind: type = RunConfig, prefix: str = "") -> list[str]:
    """Return every dotted key of the schema, leaves only."""
    keys: list[str] = []
    for item in fields(kind):
        nested = item.default_factory
        if isinstance(nested, type) and is_dataclass(nested):
            keys += known_keys(nested, f"{prefix}{item.name}.")
        else:
            keys.append(prefix + item.name)
    return keys
