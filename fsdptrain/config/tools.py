"""What the values of other training tools' keys mean in a recipe, as data: `config.convert` applies it.

`config.names` has the key that replaces each foreign name. The tables here add what a copy of the value would get
wrong: values that are spelt or counted otherwise, names of both sides, and the defaults of each tool. A name is looked
up as `parent.name` first. Paths that start with `_` are parts of a value, which `config.convert` puts together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from fsdptrain.config.schema import TrackerName
from fsdptrain.config.strategy import FSDP1_NUMBERS, ZERO_STAGES, Strategy

NOTE = "note"  # instead of a recipe key: a sentence about a value whose meaning changes
Settings = dict[str, Any]  # recipe key, part or NOTE → value


@dataclass(frozen=True)
class Tool:
    """A tool, the names that its files are known by, and its defaults where a recipe has others."""

    name: str
    known_by: frozenset[str]
    defaults: Settings


_TRAINER: Settings = {
    "optim.lr": 5e-5, "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.0,
    "schedule.name": "linear", "schedule.warmup": 0, "schedule.min_lr": 0.0,
    "train.epochs": 3, "train.micro_batch_size": 8, "data.packing": "none",
}  # fmt: skip

# In the order in which they are looked for. Axolotl, LLaMA-Factory and TRL train with the Trainer of transformers.
TOOLS = (
    Tool(
        "torchtune",
        frozenset({"_component_"}),
        {
            "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.01, "optim.max_grad_norm": None,
            "schedule.name": "constant", "schedule.warmup": 0, "schedule.min_lr": 0.0, "data.packing": "none",
        },
    ),
    Tool(
        "Axolotl",
        frozenset({"base_model"}),
        {key: value for key, value in _TRAINER.items() if key != "schedule.warmup"}
        | {"schedule.name": "cosine", "train.epochs": 1, "train.micro_batch_size": 1, "data.seq_len": 512},
    ),
    Tool(
        "LLaMA-Factory",
        frozenset({"finetuning_type", "cutoff_len", "template", "dataset_dir"}),
        _TRAINER | {"adapter.r": 8},
    ),
    Tool(
        "TRL",
        frozenset({"model_name_or_path", "dataset_name", "per_device_train_batch_size", "max_length"}),
        _TRAINER
        | {"optim.lr": 2e-5, "data.seq_len": 1024, "adapter.dropout": 0.05, "adapter.target": ["q_proj", "v_proj"]},
    ),
    Tool("DeepSpeed", frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"}), {}),
    Tool("Accelerate", frozenset({"compute_environment", "distributed_type", "fsdp_config"}), {}),
)  # fmt: skip

ASSUMED_RANKS = 8  # if no file has a number of processes

# Foreign name → the recipe key that its value is copied to, or the part. The first are names of both sides, which
# `config.names` therefore does not have; the other ones have a part of a value.
COPIED = {
    "weight_decay": "optim.weight_decay", "lr": "optim.lr", "betas": "optim.betas", "eps": "optim.eps",
    "momentum": "optim.momentum", "nesterov": "optim.nesterov", "max_grad_norm": "optim.max_grad_norm",
    "optim": "optim.name", "optimizer": "optim.name", "optimizer.type": "optim.name",
    "lr_scheduler": "schedule.name", "lr_scheduler_type": "schedule.name", "scheduler.type": "schedule.name",
    "seed": "seed", "output_dir": "output_dir", "epochs": "train.epochs", "micro_batch_size": "train.micro_batch_size",
    "compile": "train.compile", "dtype": "model.dtype", "attn_implementation": "model.attn_implementation",
    "tokenizer": "model.tokenizer", "separator": "data.separator", "revision": "model.revision",
    "use_dora": "adapter.use_dora", "use_rslora": "adapter.use_rslora",
    "cpu_offload": "fsdp.cpu_offload", "backward_prefetch": "fsdp.backward_prefetch",
    "bucket_cap_mb": "fsdp.bucket_cap_mb",
    "conversation_column": "_messages", "dataset.source": "data.path",
    "dataset.data_files": "data.path", "dataset.column": "_text", "dataset_text_field": "_text",
    "text_column": "_text", "prompt_column": "_prompt", "response_column": "_completion",
    "messages_column": "_messages",
    "column_map.input": "_prompt", "column_map.output": "_completion", "column_map.conversations": "_messages",
    "dataset_config": "_config", "dataset_config_name": "_config", "dataset.name": "_config",
    "dataset_split": "_split", "train_split": "_split", "dataset_train_split": "_split", "dataset.split": "_split",
    "dataset_test_split": "_test_split", "validation_split": "_test_split",
    "adam_beta1": "_beta1", "adam_beta2": "_beta2",
    "gradient_accumulation_steps": "_accumulation", "gradient_accumulation_iters": "_accumulation",
    "accumulate_grad_batches": "_accumulation", "num_processes": "_ranks", "warmup_num_steps": "schedule.warmup",
    "main_process_ip": "_host", "master_addr": "_host", "main_process_port": "_port", "master_port": "_port",
    "dp_replicate_size": "_copies", "parallelism_config_dp_replicate_size": "_copies",
    "data_parallel_replicate_dim": "_copies", "dp_shard_size": "_shard_size",
    "parallelism_config_dp_shard_size": "_shard_size", "data_parallel_shard_dim": "_shard_size",
    "mics_shard_size": "_shard_size",
}  # fmt: skip

# The types of the parts; the others are texts. Numbers are above 0.
PART_TYPES: dict[str, Any] = {
    "_accumulation": int, "_ranks": int, "_copies": int, "_shard_size": int, "_port": int,
    "_beta1": (int, float), "_beta2": (int, float),
}  # fmt: skip

_ALPACA: Settings = {
    "data.format": "prompt_completion",
    "data.columns": {"prompt": ["instruction", "input"], "completion": "output"},
    NOTE: "a prompt is the instruction and the input, without Alpaca's words around them (### Instruction: …)",
}

_SHAREGPT: Settings = {"data.format": "chat", "data.columns": {"messages": "conversations"}}

# Kind of data set → how its rows are read: Axolotl's `type` up to the first colon, and torchtune's dataset components.
KINDS: dict[str, Settings] = {
    "alpaca": _ALPACA, "alpaca_chat": _ALPACA, "sharegpt": _SHAREGPT, "chat_template": {"data.format": "chat"},
    "completion": {"data.format": "text"}, "pretrain": {"data.format": "text"},
    "alpaca_dataset": {"data.path": "tatsu-lab/alpaca", **_ALPACA},
    "alpaca_cleaned_dataset": {"data.path": "yahma/alpaca-cleaned", **_ALPACA},
    "slimorca_dataset": {"data.path": "Open-Orca/SlimOrca-Dedup", **_SHAREGPT},
    "samsum_dataset": {
        "data.path": "Samsung/samsum", "data.format": "prompt_completion",
        "data.columns": {"prompt": "dialogue", "completion": "summary"},
    },
    "instruct_dataset": {
        "data.format": "prompt_completion", "data.columns": {"prompt": "input", "completion": "output"},
    },
    "chat_dataset": _SHAREGPT, "text_completion_dataset": {"data.format": "text"},
    "wikitext_dataset": {
        "data.path": "EleutherAI/wikitext_document_level", "data.format": "text", "data.columns": {"text": "page"},
    },
}  # fmt: skip


def _yes(path: str, value: Any = True) -> dict[Any, Settings]:
    """Return the meanings of a switch that sets a key to `value` when it is on, and nothing when it is off."""
    return {True: {path: value}, False: {}}


_PACKS: dict[Any, Settings] = {True: {"data.packing": "bfd"}, False: {"data.packing": "none"}}
_RECOMPUTES: dict[Any, Settings] = {
    **_yes("fsdp.activation_checkpointing", "full"), "unsloth": {"fsdp.activation_checkpointing": "full"},
}  # fmt: skip
_ALL_TRAINED: dict[Any, Settings] = {True: {"data.train_on": "all"}, False: {"data.train_on": "completion"}}
_ANSWERS_TRAINED: dict[Any, Settings] = {True: {"data.train_on": "completion"}, False: {"data.train_on": "all"}}
_NUMBERED: dict[Any, Settings] = {number: {"fsdp.strategy": kind.value} for number, kind in FSDP1_NUMBERS.items()}
_STAGES: dict[Any, Settings] = {stage: {"fsdp.strategy": kind.value} for stage, kind in ZERO_STAGES.items()}
_STAGES[1] = {
    **_STAGES[2],
    "fsdp.accumulation": "hold",
    NOTE: "ZeRO-1: fsdp.accumulation: hold reduces gradients once a step, and until then each rank has all of them",
}
_RESHARDS: dict[Any, Settings] = {True: _STAGES[3], False: _STAGES[2]}
_SECTION_BF16: dict[Any, Settings] = _yes("fsdp.mixed_precision.param_dtype", "bfloat16")
_ON_DEVICE: dict[Any, Settings] = {"cpu": {"fsdp.cpu_offload": True}, "none": {}}
_FLASH: dict[Any, Settings] = {True: {}, False: {}}  # attn_implementation: auto takes the fastest kernel that there is
_OFFLOADED = {"kind": "full", "offload": True}
_FP16: Settings = {"fsdp.mixed_precision.param_dtype": "float16"}

# Foreign name → value → what it sets. A value that is not here has no counterpart; other names' values are copied.
MEANINGS: dict[str, dict[Any, Settings]] = {
    "adapter": {"lora": {"adapter.kind": "lora"}, "qlora": {"adapter.kind": "qlora"}},
    "finetuning_type": {"lora": {"adapter.kind": "lora"}, "full": {}},
    "peft_type": {"LORA": {"adapter.kind": "lora"}, "lora": {"adapter.kind": "lora"}},
    "use_peft": _yes("adapter.kind", "lora"),
    "load_in_4bit": _yes("adapter.kind", "qlora"),
    "quantization_bit": {4: {"adapter.kind": "qlora"}},
    "lora_target_linear": _yes("adapter.target", "all-linear"),
    "apply_lora_to_mlp": _yes("adapter.target", ["gate_proj", "up_proj", "down_proj"]),
    "apply_lora_to_output": _yes("adapter.target", ["lm_head"]),
    "merge_lora": _yes("export.adapter", "merged"),
    "save_adapter_weights_only": _yes("export.adapter", "separate"),
    "stage": _STAGES | {"sft": {}, "pt": {"data.format": "text"}},
    "zero_stage": _STAGES,
    "sharding_strategy": _NUMBERED,
    "reshard_after_forward": _RESHARDS,
    "auto_wrap_policy": {"TRANSFORMER_BASED_WRAP": {}, "SIZE_BASED_WRAP": {}},
    "forward_prefetch": _yes("fsdp.forward_prefetch", 1),
    "offload_optimizer.device": _ON_DEVICE,
    "offload_param.device": _ON_DEVICE,
    "gradient_checkpointing": _RECOMPUTES,
    "activation_checkpointing": _RECOMPUTES,
    "enable_activation_checkpointing": _RECOMPUTES,
    "activation_offloading": _yes("fsdp.activation_checkpointing", _OFFLOADED),
    "enable_activation_offloading": _yes("fsdp.activation_checkpointing", _OFFLOADED),
    "disable_gradient_checkpointing": {True: {}, False: {"fsdp.activation_checkpointing": "full"}},
    "bf16": {
        True: {"fsdp.mixed_precision.param_dtype": "bfloat16"},
        "auto": {"fsdp.mixed_precision.param_dtype": "bfloat16"},
        "full": {"fsdp.mixed_precision.param_dtype": "bfloat16", "model.dtype": "bfloat16"},
        False: {"fsdp.mixed_precision.param_dtype": "float32"},
    },
    "bf16.enabled": _SECTION_BF16,
    "fp16.enabled": {True: _FP16, "auto": {}, False: {}},
    "fp16": {True: _FP16, "auto": {}, False: {}},
    "float16": {True: _FP16, False: {}},
    "pure_bf16": _yes("model.dtype", "bfloat16"),
    "mixed_precision": {
        "bf16": {"fsdp.mixed_precision.param_dtype": "bfloat16"},
        "no": {"fsdp.mixed_precision.param_dtype": "float32"},
        "fp16": _FP16,
    },
    "flash_attention": _FLASH,
    "use_flash_attention_2": _FLASH,
    "use_flash_attention": _FLASH,
    "attn_implementation": {"flash_attention_2": {}, "flash_attention_3": {}},
    "sdp_attention": _yes("model.attn_implementation", "sdpa"),
    "eager_attention": _yes("model.attn_implementation", "eager"),
    "flex_attention": _yes("model.attn_implementation", "flex_attention"),
    "flash_attn": {
        "auto": {}, "fa2": {},
        "sdpa": {"model.attn_implementation": "sdpa"}, "disabled": {"model.attn_implementation": "eager"},
    },
    "sample_packing": _PACKS,
    "packing": _PACKS,
    "packed": _PACKS,
    "neat_packing": _PACKS,
    "packing_strategy": {"bfd": {}, "ffd": {}, "wrapped": {"data.packing": "concat"}},
    "pretraining_sample_concatenation": _yes("data.packing", "concat"),
    "train_on_inputs": _ALL_TRAINED,
    "train_on_input": _ALL_TRAINED,
    "train_on_prompt": _ALL_TRAINED,
    "train_on_source": _ALL_TRAINED,
    "completion_only_loss": _ANSWERS_TRAINED,
    "assistant_only_loss": _ANSWERS_TRAINED,
    "mask_history": _yes("data.turns", "last"),
    "enable_thinking": {on: {"data.chat_template_kwargs": {"enable_thinking": on}} for on in (True, False)},
    "excess_length_strategy": {"drop": {"data.long_rows": "drop"}, "truncate": {"data.long_rows": "cut"}},
    "dataset_exact_deduplication": _yes("data.drop_duplicates"),
    "chat_template": {"tokenizer_default": {}, "jinja": {}},
    "torch_compile": {True: {"train.compile": True}, "auto": {}, False: {}},
    "compile": {True: {"train.compile": True}, False: {}},
    "full_determinism": _yes("train.deterministic"),
    "cudnn_deterministic_mode": _yes("train.deterministic"),
    "save_strategy": {"steps": {}, "no": {"checkpoint.every": None}},
    "eval_strategy": {"steps": {}, "no": {}},
    "evaluation_strategy": {"steps": {}, "no": {}},
    "logging_strategy": {"steps": {}},
    "logging_first_step": {True: {}, False: {}},
    "shuffle": {True: {}},
    "optimizer.fused": {True: {}, False: {}},
    "resume_from_checkpoint": {},
    "auto_resume_from_checkpoints": {True: {}},
    "report_to": {
        **{name: {"log.trackers": [name]} for name in get_args(TrackerName)}, "none": {"log.trackers": []},
    },
    "wandb": {True: {"log.trackers": ["wandb"]}}, "use_wandb": {True: {"log.trackers": ["wandb"]}},
    "use_mlflow": {True: {"log.trackers": ["mlflow"]}},
    "save_safetensors": {True: {}},
    "stage3_gather_16bit_weights_on_model_save": _yes("export.at_end"),
    "fsdp": {
        **{kind.value.lower(): {"fsdp.strategy": kind.value} for kind in Strategy},
        "auto_wrap": {}, "offload": {"fsdp.cpu_offload": True},
    },
}  # fmt: skip

# Names whose values count something else than the key that replaces them: what to do about it.
COUNTED_OTHERWISE = {
    "saves_per_epoch": "counted per epoch: set checkpoint.every to a number of steps",
    "evals_per_epoch": "counted per epoch: set eval.every to a number of steps",
    "max_steps_per_epoch": "counted per epoch: set train.steps to the steps of the whole run",
    "validation_split_percentage": "set data.eval to {fraction: …}",
    "max_eval_samples": "set data.eval to {path: …, max_rows: …}",
    "bf16_full_eval": "evaluation computes in fsdp.mixed_precision.param_dtype",
    "per_device_eval_batch_size": "train.micro_batch_size: evaluation uses it too",
    "eval_batch_size": "train.micro_batch_size: evaluation uses it too",
    "batch_size_val": "train.micro_batch_size: evaluation uses it too",
    "chat_template": "data.format: chat uses the tokenizer's own template; data.chat_template takes another's file",
    "dataset_dir": "data.path is the file itself, not a folder with a dataset_info.json",
    "ddp_timeout": "launch.timeout_s keeps its default: a limit of days would not find a run that hangs",
    "freeze_trainable_layers": "set model.trainable to the names of parameters",
}
