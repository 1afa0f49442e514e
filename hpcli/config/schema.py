"""Every key of the YAML: its type, default, range and meaning.

The reference in the README, the JSON schema and the "allowed" part of every message are generated from these
models, so a key is described here and nowhere else.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpcli.config.field_types import LARGEST_WORLD, Beta, MaxNorm, NormType, Pattern, ShardDegree

LARGEST_SIZE = 2**24  # a dimension, a batch, a number of layers
LARGEST_COUNT = 10**12  # steps
LARGEST_SEED = 2**32 - 1  # what every framework's generator accepts

MODEL_KINDS = ("decoder", "mla", "moe", "vlm")
Preset = Literal[
    "decoder-tiny", "decoder-small", "mla-tiny", "mla-small", "moe-tiny", "moe-small", "vlm-tiny", "vlm-small"
]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


class Section(BaseModel):
    """Nothing is converted, guessed or ignored."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
        hide_input_in_errors=True,
    )


def _size(description: str, *, least: int = 1) -> Any:
    return Field(
        default=None, ge=least, le=LARGEST_SIZE, description=f"{description} Left out, it is the preset's."
    )


def _degree(description: str) -> Any:
    return Field(default=1, ge=1, le=LARGEST_WORLD, description=description)


class DeviceOptions(Section):
    """Options of the simulated NPU."""

    strict_dtypes: bool = Field(
        default=False,
        description="Refuse, as Ascend does, what the host's CPU would allow, such as multiplying a half "
        "tensor in "
        "place by a float32 scalar tensor. Only `device: sim-npu` reads it.",
    )


class ModelSection(Section):
    """Which model, and where it departs from its preset."""

    preset: Preset = Field(
        default="decoder-tiny", description="Kind and size; the other keys override single sizes."
    )
    vocab_size: int | None = _size(
        "Size of the vocabulary; the built-in text is read as bytes, 256 of them.", least=256
    )
    hidden_size: int | None = _size("Width of the residual stream.")
    num_layers: int | None = _size("Number of decoder layers.")
    num_heads: int | None = _size("Query heads; must divide hidden_size, and leave an even head size.")
    num_kv_heads: int | None = _size("Key and value heads (grouped-query attention); must divide num_heads.")
    ffn_size: int | None = _size("Inner width of the SwiGLU feed-forward network.")
    attention: Literal["gqa", "mla"] | None = Field(
        default=None,
        description="`gqa`: grouped-query attention; `mla`: multi-head latent attention as in DeepSeek-V3. Left out, it is the "
        "preset's.",
    )
    q_lora_rank: int | None = _size("mla: width of the queries' latent; 0: queries come from the hidden state.", least=0)
    kv_lora_rank: int | None = _size("mla: width of the latent that keys and values come from.")
    qk_nope_head_dim: int | None = _size("mla: part of a query's and key's head that has no position.")
    qk_rope_head_dim: int | None = _size("mla: part with rotary position, shared by the keys of all heads; even.")
    v_head_dim: int | None = _size("mla: head size of the values.")
    num_experts: int | None = _size("Routed experts of a layer; 0: a dense feed-forward network.", least=0)
    experts_per_token: int | None = _size("How many experts each token goes to.")
    expert_ffn_size: int | None = _size("Inner width of each expert.")
    num_shared_experts: int | None = _size("Experts that every token goes to beside its own.", least=0)
    first_dense_layers: int | None = _size("So many layers at the beginning have no experts.", least=0)
    image_height: int | None = _size("vlm: height of an image in pixels.")
    image_width: int | None = _size("vlm: width of an image in pixels.")
    patch_size: int | None = _size("vlm: side of the square patches that an image is cut into; divides both.")
    vision_hidden_size: int | None = _size("vlm: width of the vision encoder.")
    vision_layers: int | None = _size("vlm: layers of the vision encoder.")
    vision_heads: int | None = _size("vlm: attention heads of the vision encoder.")
    vision_ffn_size: int | None = _size("vlm: inner width of the vision encoder's feed-forward networks.")
    rope_theta: float | None = Field(
        default=None, gt=0, description="Base of the rotary position embedding. Left out, it is the preset's."
    )
    norm_eps: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Added to the mean square in RMSNorm. Left out, it is the preset's.",
    )
    tie_embeddings: bool | None = Field(
        default=None,
        description="One matrix for the token embedding and the output projection. Left out, it is the "
        "preset's.",
    )
    freeze: list[Pattern] = Field(
        default_factory=list,
        description="Parameters that do not train, as shell patterns on their names, such as "
        "`['layers.0.*']`.",
    )

    @property
    def kind(self) -> str:
        """`decoder`, `mla`, `moe` or `vlm`."""
        return self.preset.partition("-")[0]


class DataSection(Section):
    """What it learns from."""

    source: Literal["builtin"] = Field(
        default="builtin",
        description="`builtin`: the English reference text that comes with Python, no download.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="A text file to learn from instead, read as bytes; it wins over `source`. Relative to "
        "the current "
        "directory; `~` is your home.",
    )
    shuffle: bool = Field(
        default=True, description="Draw the sequences in an order that depends on training.seed."
    )


class LossScale(Section):
    """Dynamic loss scaling."""

    initial: float = Field(default=65536.0, gt=0, description="The scale of the first step.")
    growth_interval: int = Field(
        default=2000,
        ge=1,
        le=LARGEST_COUNT,
        description="Steps without overflow after which the scale doubles.",
    )


class TrainingSection(Section):
    """How long, on how much, and in which precision."""

    steps: int = Field(default=100, ge=1, le=LARGEST_COUNT, description="Optimizer steps.")
    global_batch_size: int = Field(
        default=8,
        ge=1,
        le=LARGEST_SIZE,
        description="Sequences in a step, over all ranks; a multiple of the data-parallel ranks.",
    )
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="Sequences a data-parallel rank computes at once; smaller than its share of the batch, "
        "gradients "
        "accumulate. Left out, it is the whole share.",
    )
    seq_length: int = Field(default=128, ge=1, le=LARGEST_SIZE, description="Tokens in a sequence.")
    seed: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SEED,
        description="Decides the initial weights and the batches, whatever the layout.",
    )
    max_norm: MaxNorm = Field(
        default=1.0,
        description="Gradients are scaled down to this global norm; `inf` measures it and changes nothing.",
    )
    norm_type: NormType = Field(default=2.0, description="The p of the norm; `inf` is the largest magnitude.")
    error_if_nonfinite: bool = Field(
        default=False,
        description="Stop at a gradient norm that is not finite. Otherwise the step is skipped and said so.",
    )
    params_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Storage of the parameters. Optimizer state and master weights are float32 always.",
    )
    compute_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Parameters and activations while computing; the native dtype of gradients.",
    )
    accumulate_allreduce_grads_in_fp32: bool = Field(
        default=True,
        description="Accumulate gradients over micro-batches and reduce them over ranks in float32; false: "
        "in "
        "compute_dtype.",
    )
    activation_checkpointing: Literal["none", "full"] = Field(
        default="none",
        description="`full` keeps only each layer's input and computes the layer again in backward.",
    )
    loss_scale: LossScale | None = Field(
        default=None,
        description="Dynamic loss scaling, for compute_dtype float16; null: its defaults there, else none.",
    )
    deterministic: bool = Field(
        default=False,
        description="Allow only deterministic kernels; an operation that has none is an error. Slower on "
        "accelerators.",
    )


class OptimizerSection(Section):
    """How the weights move."""

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="`sgd` has no momentum.")
    lr: float = Field(default=1e-3, ge=0, description="Learning rate; 0 leaves the weights as they are.")
    weight_decay: float = Field(
        default=0.01, ge=0, description="Decoupled in adamw, part of the gradient in sgd."
    )
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), strict=False, description="Decay of adamw's two running means."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to adamw's denominator.")
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=LARGEST_COUNT,
        description="Steps over which the learning rate rises linearly to lr.",
    )


class ParallelismSection(Section):
    """How the ranks share the work. The degrees, without expert_parallel, multiply to the number of ranks."""

    data_parallel_replicate: int = _degree("Replicas of the sharded model (HSDP).")
    data_parallel_shard: ShardDegree | None = Field(
        default=None,
        description="Ranks over which parameters, gradients and optimizer state are sharded (FSDP). -1: all "
        "that the "
        "other degrees leave. Left out: -1 where the number of ranks is known, else 1.",
    )
    tensor_parallel: int = _degree("Ranks that split every layer's matrices.")
    sequence_parallel: bool = Field(
        default=False,
        description="Also split the sequence between those layers; needs tensor_parallel 2 or more.",
    )
    pipeline_parallel: int = _degree("Ranks that each hold some of the layers.")
    pipeline_parallel_schedule: Schedule = Field(
        default="1f1b",
        description="Order of the micro-batches. The last three are zero-bubble schedules: with them "
        "fsdp_config.reshard_after_forward must be false.",
    )
    pipeline_parallel_interleave_num: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="Stages on each pipeline rank. Left out: 1 for gpipe and 1f1b, else 2.",
    )
    expert_parallel: int = _degree("Ranks that share the experts, taken out of the data-parallel ranks.")


class FsdpSection(Section):
    """How parameters are sharded."""

    enable_offload: bool = Field(
        default=False, description="Keep shards, their gradients and the optimizer on the CPU between uses."
    )
    pin_memory: bool | None = Field(
        default=None,
        description="Page-lock the offloaded shards. Left out: on with an accelerator, off on the CPU.",
    )
    reshard_after_forward: bool | None = Field(
        default=None,
        description="Free the unsharded parameters between forward and backward. Left out: the engine "
        "decides (only the "
        "outermost unit keeps them); false with a zero-bubble schedule.",
    )
    comm_fusion: bool = Field(
        default=False,
        description="One fused buffer for a group's all-reduce. MindSpore only: torch always fuses.",
    )
    unit: Literal["auto", "layer", "model"] = Field(
        default="auto",
        description="What is gathered together: each layer, the whole model, or layers grouped by size.",
    )


class LaunchSection(Section):
    """How ranks are started and watched."""

    timeout_seconds: float = Field(
        default=300.0,
        gt=0,
        le=30 * 86400.0,
        description="A rank that makes no progress for this long ends the run.",
    )
    ranks: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_WORLD,
        description="Ranks to start where neither --ranks nor a launcher says so.",
    )


class CheckpointSection(Section):
    """Saving and resuming."""

    every: int = Field(default=0, ge=0, le=LARGEST_COUNT, description="Steps between checkpoints; 0: none.")
    keep: int = Field(
        default=3, ge=1, le=LARGEST_SIZE, description="The newest so many stay, older ones are deleted."
    )
    directory: str | None = Field(
        default=None,
        min_length=1,
        description="Where they are written. Left out: `checkpoints` in the output directory.",
    )


class LoggingSection(Section):
    """What is recorded."""

    jsonl: bool = Field(
        default=True, description="Write metrics.jsonl, one line a step, into the output directory."
    )
    tensorboard: bool = Field(default=False, description="Write TensorBoard event files there too.")
    norm_table_every: int = Field(
        default=50,
        ge=0,
        le=LARGEST_COUNT,
        description="Steps between tables with one row a rank; 0: only at the end.",
    )
    plot: bool = Field(default=True, description="Draw loss and norm into a PNG at the end.")


def _section(model: type[Section]) -> Any:
    return Field(default_factory=model, description=(model.__doc__ or "").strip())


class Config(Section):
    """A training run of hpcli."""

    platform: Literal["torch", "mindspore"] = Field(default="torch", description="The framework that trains.")
    device: Literal["auto", "cpu", "cuda", "npu", "sim-npu"] = Field(
        default="auto",
        description="`auto`: an accelerator if there is one, else the CPU. `sim-npu`: a simulated NPU.",
    )
    device_options: DeviceOptions = _section(DeviceOptions)
    model: ModelSection = _section(ModelSection)
    data: DataSection = _section(DataSection)
    training: TrainingSection = _section(TrainingSection)
    optimizer: OptimizerSection = _section(OptimizerSection)
    parallelism: ParallelismSection = _section(ParallelismSection)
    fsdp_config: FsdpSection = _section(FsdpSection)
    launch: LaunchSection = _section(LaunchSection)
    checkpoint: CheckpointSection = _section(CheckpointSection)
    logging: LoggingSection = _section(LoggingSection)


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
