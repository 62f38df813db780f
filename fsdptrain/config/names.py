"""The most used keys and values of other training tools, and the recipe key that replaces each of them.

The tools are FSDP1, Accelerate, DeepSpeed, the Hugging Face Trainer, TRL, Axolotl, torchtune and LLaMA-Factory.
After a change, run `python docs/tables.py`, which writes the tables of `docs/from-fsdp1.md`; a test compares the two.
"""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.strategy import Strategy
from fsdptrain.run_folder.files import shipped

TABLES = "docs/from-fsdp1.md"  # ships with the package; messages name where it is

# What replaces a foreign name → the foreign names it replaces. A text starts with a recipe key or section, or with the
# reason why there is none ("not …", "always …", "derived …"). `*` matches any characters.
FOREIGN_NAMES = {
    # model and adapter
    "model.id": "base_model model_name_or_path",
    "model.tokenizer": "tokenizer_name",
    "model.config": "rope_scaling",
    "model.config: {model_type: …}, only for a model from scratch; a pretrained one has it in its config.json": (
        "model_type"
    ),
    "model.dtype: the dtype of the master weights; compute uses fsdp.mixed_precision.param_dtype": "torch_dtype",
    "model.attn_implementation": "flash_attention use_flash_attention_2",
    "model.add_tokens": "new_special_tokens",
    "model.trainable: the parameters to train, by name or pattern": "unfrozen_parameters",
    "adapter": "peft_config",
    "adapter.kind: lora or qlora, null to train the whole model": "use_peft finetuning_type",
    "adapter.r": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.target: all-linear, or a list of names and patterns": "lora_target lora_target_modules lora_target_linear",
    "adapter.modules_to_save": "lora_modules_to_save",
    "adapter.from: a folder that peft has saved": "lora_model_dir adapter_name_or_path",
    "adapter.kind: qlora, which quantises to 4 bits (NF4 with double quantisation)": "load_in_4bit quantization_config",
    "not supported: adapter.kind: qlora quantises frozen weights to 4 bits while it reads plain ones": "load_in_8bit",
    "not supported: the keys of the section adapter describe an adapter": "lora_*",
    "not supported: a recipe cannot name Python objects": "_component_ plugins",
    "not supported: train.compile fuses kernels, and train.loss: chunked avoids the logits of a whole batch": (
        "liger_* use_liger_kernel"
    ),
    # data
    "data.path": "datasets dataset dataset_name train_file",
    "data.path: org/name:config:split": "dataset_config_name dataset_split",
    "data.format: text, chat or prompt_completion": "dataset_type",
    "data.format: chat uses the tokenizer's own template; delete the line": "apply_chat_template template",
    "data.columns": "dataset_text_field",
    "data.seq_len": "sequence_len max_seq_length max_seq_len cutoff_len max_length block_size",
    "data.packing: bfd, concat or none; documents in one sequence do not attend to each other": "sample_packing packed",
    "always on: every sequence is data.seq_len tokens long; delete the line": "pad_to_sequence_len",
    "not supported: data.packing fills every sequence, instead of sorting rows by length": "group_by_length",
    "data.train_on: all or completion": "train_on_inputs completion_only_loss assistant_only_loss",
    "data.max_rows": "max_samples max_train_samples",
    "not supported: remove equal rows from the files, before they are read": (
        "drop_duplicates dataset_exact_deduplication"
    ),
    "data.eval: {fraction: 0.01} or {path: …}": "val_set_size val_size eval_dataset",
    "data.sources: a list of {path: …, weight: …}": "interleave_probs",
    "always on: each epoch has its own order, drawn from seed": "shuffle",
    "data.window: files are prepared and read some at a time": "streaming",
    "not needed: rows are tokenised and packed once, into a memory-mapped cache; delete the line": (
        "dataset_prepared_path preprocessing_num_workers dataloader_*"
    ),
    # fsdp
    f"fsdp: {TABLES} lists what each of its keys is called here": "fsdp_config",
    "fsdp: ZeRO stage 3 is fsdp.strategy: FULL_SHARD, stage 2 is SHARD_GRAD_OP, stage 1 with accumulation: hold; "
    f"{TABLES} lists the rest": "deepspeed deepspeed_config zero_optimization zero_stage",
    "fsdp.strategy": "sharding_strategy parallelism_config",
    "fsdp.shard_size: with fsdp.strategy: HYBRID_SHARD; the number of copies is derived": (
        "mics_shard_size dp_shard_size dp_replicate_size"
    ),
    "fsdp.wrap: a list of class names": "transformer_layer_cls_to_wrap auto_wrap_policy",
    "fsdp.wrap: {min_params: …}": "min_num_params",
    "fsdp.mixed_precision.param_dtype: bfloat16 (the default) or float32": "bf16",
    "fsdp.mixed_precision.param_dtype: float16, for GPUs without bfloat16": "fp16",
    "train.float8: rowwise or tensorwise": "fp8",
    "not supported: float32 matrix products use full float32 precision": "tf32",
    "fsdp.cpu_offload": "offload_params offload_optimizer offload_param",
    "fsdp.activation_checkpointing": "gradient_checkpointing enable_activation_checkpointing",
    "fsdp.activation_checkpointing: {kind: full, offload: true}": "activation_offloading",
    "always not reentrant: delete the line": "gradient_checkpointing_kwargs",
    "always on in this engine (FSDP2): delete the line": (
        "use_orig_params sync_module_states limit_all_gathers cpu_ram_efficient_loading overlap_comm"
    ),
    "always off: inputs have the same dtypes as in a bf16 model of transformers; delete the line": (
        "cast_forward_inputs"
    ),
    "always 2 (FSDP2): delete the line": "fsdp_version",
    "derived (checkpoints are sharded, the export is full): delete the line": "state_dict_type",
    "derived from fsdp.strategy, fsdp.shard_size and the number of ranks": "process_group device_mesh",
    "derived from fsdp.wrap and the prefetch keys: delete the line": "reduce_bucket_size allgather_bucket_size",
    "parallel.context": "context_parallel_size",
    "not supported: tensors and layers are not divided among ranks": "tensor_parallel_size pipeline_*",
    "fsdp.bucket_cap_mb: with fsdp.strategy: NO_SHARD": "ddp_bucket_cap_mb",
    "not needed: a parameter that the model never uses gets no gradient, and no rank waits for it; delete the line": (
        "find_unused_parameters ddp_find_unused_parameters"
    ),
    "not supported: it is a setting of DistributedDataParallel, and this engine is FSDP2": "ddp_*",
    "not supported: frozen parameters are sharded too; fsdp.strategy: NO_SHARD keeps all of them whole": (
        "ignored_modules ignored_states"
    ),
    # optim, schedule, train
    "optim": "optimizer",
    "optim.lr": "learning_rate",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.max_grad_norm": "gradient_clipping clip_grad_norm",
    "schedule": "lr_scheduler",
    "schedule.name: constant, linear, cosine or wsd": "lr_scheduler_type",
    "schedule.warmup: a fraction of all steps if below 1, else a number of steps": "warmup_ratio warmup_steps",
    "schedule.min_lr: a fraction of optim.lr": "min_lr_ratio",
    "not supported: no noise is added to embeddings (NEFTune)": "neftune_noise_alpha",
    "train.epochs": "num_train_epochs num_epochs",
    "train.steps": "max_steps",
    "train.global_batch_size": "train_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu",
    "train.micro_batch_size: evaluation uses it too": "per_device_eval_batch_size",
    "train.micro_batch_size: sequences per rank; train.global_batch_size counts those of a whole step": "batch_size",
    "derived from train.global_batch_size and train.micro_batch_size": "gradient_accumulation_steps",
    "train.compile": "torch_compile",
    # eval, checkpoint, export, log, launch
    "eval.patience": "early_stopping_patience",
    "eval.every": "eval_steps eval_strategy",
    "checkpoint.every": "save_steps save_strategy",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.resume: auto (the default) continues from the newest valid checkpoint in output_dir": (
        "resume_from_checkpoint"
    ),
    "not supported: a run folder is never overwritten; choose another output_dir": "overwrite_output_dir",
    "export.which: best, with checkpoint.keep_best": "load_best_model_at_end",
    "not supported: publish the export folder yourself, with hf upload": "push_to_hub",
    "name": "run_name",
    "log.every": "logging_steps",
    "log.trackers": "report_to wandb",
    "log.project": "wandb_project",
    "not a recipe key: an environment variable of the library": "wandb_* mlflow_*",
    "launch.nproc_per_node: workers on one node (num_processes / num_machines)": "num_processes",
    "launch.nnodes: start the same command on every node": "num_machines",
    "launch.rdzv_endpoint: host:port of the first node": "main_process_ip main_process_port",
    "launch.timeout_s": "ddp_timeout",
    "not a recipe key, because a recipe cannot enable code: use --trust-remote-code, and set model.revision to a full "
    "commit": "trust_remote_code",
    "not a recipe key, because recipes are copied to the run folder: set HF_TOKEN in the environment": "token hf_token",
    "not supported, except DPO: set data.format: preference, train.objective: dpo and train.dpo.beta": "rl",
}

# Foreign name → the text that replaces it.
REPLACEMENTS = {name: text for text, names in FOREIGN_NAMES.items() for name in names.split()}

_PATTERNS = {name: text for name, text in REPLACEMENTS.items() if "*" in name}

# Key → foreign value → the recipe's value. A message suggests the value; it is never substituted silently.
FOREIGN_VALUES: dict[str, dict[Any, Any]] = {
    "fsdp.strategy": {alias: strategy.value for strategy in Strategy for alias in strategy.aliases},
    "fsdp.mixed_precision.param_dtype": {"mixed": "bfloat16"},
    "fsdp.backward_prefetch": {"no_prefetch": "NONE", None: "NONE", False: "NONE", True: "BACKWARD_PRE"},
    "fsdp.activation_checkpointing": {True: "full", False: "none", None: "none", "block": "full"},
    "fsdp.wrap": {True: "auto", "transformer_based_wrap": "auto", "size_based_wrap": {"min_params": 100_000_000}},
    "model.attn_implementation": {"fa2": "flash_attention_2", "flash_attention": "flash_attention_2"},
    "model.init": {True: "pretrained", False: "random", "scratch": "random"},
    "data.packing": {True: "bfd", False: "none", None: "none", "wrapped": "concat"},
    "data.format": {
        "sharegpt": "chat", "messages": "chat", "conversational": "chat", "chat_template": "chat",
        "alpaca": "prompt_completion", "instruction": "prompt_completion", "completion": "text",
    },
    "data.train_on": {"assistant": "completion", "assistant_only": "completion", "prompt": "all", True: "all"},
    "optim.name": {alias: kind.value for kind in OptimizerKind for alias in kind.traits.aliases},
    "schedule.name": {
        "constant_with_warmup": "constant", "cosine_with_warmup": "cosine", "cosine_with_min_lr": "cosine",
        "linear_with_warmup": "linear", "warmup_stable_decay": "wsd",
    },
    "checkpoint.resume": {True: "auto", False: "never", None: "never"},
}  # fmt: skip


def replacement_of(word: str) -> str | None:
    """Return the text of `FOREIGN_NAMES` for a foreign name; None for a name that no other tool uses.

    A name of FSDP1 may have the prefix `fsdp_`, as in Accelerate's files.
    """
    for name in (word, word.removeprefix("fsdp_")):
        if text := REPLACEMENTS.get(name):
            return text
    return next((text for name, text in _PATTERNS.items() if fnmatchcase(word, name)), None)


def nearest_foreign_name(word: str) -> str | None:
    """Return the foreign name that a word misspells; None if no foreign name is close. The first letter must match."""
    candidates = [name for name in REPLACEMENTS if name[:1] == word[:1] and "*" not in name]
    return next(iter(get_close_matches(word, candidates, n=1, cutoff=0.85)), None)


def leading_key(text: str) -> str | None:
    """Return the key or section that a text of `FOREIGN_NAMES` starts with; None if it starts with a reason."""
    key = text.partition(":")[0]
    return None if " " in key else key


def replacement_message(text: str) -> str:
    """Return a text of `FOREIGN_NAMES` as the predicate of a sentence whose subject is the foreign name."""
    key = leading_key(text)
    text = text.replace(TABLES, str(shipped(*TABLES.split("/"))))
    return f"is {text}" if key is None else f"is called {key} here{text.removeprefix(key)}"
