"""Keys and values of other training tools, and the recipe key that replaces each of them.

The tools are FSDP1, Accelerate, DeepSpeed, the Hugging Face Trainer, TRL, Axolotl, torchtune and LLaMA-Factory.
After a change, run `python docs/tables.py`, which writes the tables of `docs/from-fsdp1.md`; a test compares the two.
"""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.strategy import Strategy
from fsdptrain.folder.files import shipped

TABLES = "docs/from-fsdp1.md"  # ships with the package; messages name where it is
_ALWAYS = "always on in this engine (FSDP2): delete the line"
_NF4 = "adapter.kind: qlora, which quantises to 4 bits (NF4 with double quantisation)"
_QUANTISED = "not supported: adapter.kind: qlora quantises frozen weights to 4 bits while it reads plain ones"
_ADAPTERS = "not supported: the keys of the section adapter describe an adapter"
_CACHE = "not needed: rows are tokenised and packed once, into a memory-mapped cache; delete the line"
_REPORTS = "not supported: metrics.jsonl records every event; see log.trackers"

_CODE = (
    "not a recipe key, because a recipe cannot enable code: use --trust-remote-code, and set model.revision to a full "
    "commit"
)

_SECRET = "not a recipe key, because recipes are copied to the run folder: set HF_TOKEN in the environment"

# What replaces a foreign name → the foreign names it replaces. A text starts with a recipe key or section, or with the
# reason why there is none ("not …", "always …", "derived …"). `*` matches any characters.
FOREIGN_NAMES = {
    # model
    "model.id": "base_model model_name_or_path pretrained_model_name_or_path model_name checkpointer checkpoint_dir",
    "model.revision": "model_revision revision_of_model",
    "model.tokenizer": "tokenizer_config tokenizer_name tokenizer_name_or_path",
    "model.config": "overrides_of_model_config config_overrides rope_scaling rope_theta",
    "model.config: {model_type: …}, only for a model from scratch; a pretrained one has it in its config.json": (
        "model_type config_name"
    ),
    "model.dtype: the dtype of the master weights; compute uses fsdp.mixed_precision.param_dtype": (
        "torch_dtype model_dtype pure_bf16"
    ),
    "model.attn_implementation": (
        "flash_attention flash_attn attn_impl sdp_attention eager_attention flex_attention use_flash_attention "
        "use_flash_attention_2"
    ),
    "not supported: choose one of the model's own attention kernels with model.attn_implementation": (
        "xformers_attention s2_attention shift_attn sparse_attention"
    ),
    "derived from the files of the model and its tokenizer: delete the line": (
        "tokenizer_type processor_type type_of_model tokenizer_use_fast use_fast_tokenizer is_*_derived_model "
        "checkpoint_files"
    ),
    "not needed: an unknown key is always an error": "strict",
    "model.add_tokens": "tokens new_special_tokens",
    "derived from model.add_tokens: delete the line": "resize_vocab resize_token_embeddings_to_32x",
    "not supported (yet): the tokenizer keeps its tokens, and model.add_tokens adds others": (
        "special_tokens added_tokens added_tokens_overrides"
    ),
    "adapter": "peft peft_config",
    "adapter.kind: lora or qlora, null to train the whole model": "use_peft peft_type finetuning_type",
    "adapter.r": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.target: all-linear, or a list of names and patterns": (
        "lora_target lora_target_modules lora_target_linear lora_attn_modules apply_lora_to_*"
    ),
    "adapter.modules_to_save": "lora_modules_to_save additional_target",
    "adapter.use_dora": "peft_use_dora lora_use_dora",
    "adapter.use_rslora": "peft_use_rslora lora_use_rslora",
    "adapter.from: a folder that peft has saved": "lora_model_dir adapter_name_or_path",
    "export.adapter: separate, merged or both": "save_adapter_weights_only merge_lora",
    "model.trainable: the parameters to train, by name or pattern": "freeze_* unfrozen_parameters",
    "not supported: adapters have no fused kernels of their own": (
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel"
    ),
    "not supported: an adapter is not merged into the model and started again during training": "relora*",
    _ADAPTERS: "lora_*",
    _NF4: "load_in_4bit quantization_bit quantization_config bnb_4bit_* qlora*",
    _QUANTISED: "load_in_8bit quantizer gptq*",
    "not supported: a recipe cannot name Python objects": "_component_ plugins",
    "not supported: fsdp.wrap takes the names of classes, not of modules": "custom_sharded_layers",
    "not supported: train.loss: chunked (the default) already avoids the logits of a whole batch": (
        "liger_cross_entropy liger_fused_linear_cross_entropy cut_cross_entropy"
    ),
    "not supported: train.compile fuses kernels, and train.loss: chunked avoids the logits of a whole batch": (
        "liger_* use_liger_kernel enable_liger_kernel use_unsloth unsloth_*"
    ),
    # data
    "data.path": (
        "datasets pretraining_dataset dataset dataset_name dataset_path dataset_dir train_file train_files data_files "
        "data_path"
    ),
    "data.path: org/name:config:split": (
        "dataset_config dataset_config_name dataset_split dataset_train_split train_split"
    ),
    "data.format: text, chat or prompt_completion": "dataset_type dataset_format",
    "data.format: chat uses the tokenizer's own template; delete the line": "apply_chat_template template",
    "data.chat_template: a file, or the text of a template": "chat_template_path chat_template_jinja",
    "data.chat_template_kwargs: {enable_thinking: …}": "enable_thinking",
    "data.long_rows: split, cut or drop": "excess_length_strategy",
    "data.drop_duplicates": "dataset_exact_deduplication",
    "data.columns": "dataset_text_field text_column prompt_column response_column messages_column column_map",
    "data.seq_len": (
        "sequence_len max_seq_length max_seq_len cutoff_len max_length model_max_length block_size seq_length "
        "sequence_length max_sequence_length context_length"
    ),
    "data.packing: bfd, concat or none; documents in one sequence do not attend to each other": (
        "sample_packing packed neat_packing packing_strategy pretraining_sample_concatenation"
    ),
    "derived from data.packing, for held-out data too: delete the line": "eval_sample_packing eval_packing",
    "not needed: documents in one sequence never attend to each other; delete the line": "multipack_attn padding_free",
    "not supported: data.packing fills every sequence, instead of sorting rows by length": "group_by_length",
    "always on: every sequence is data.seq_len tokens long; delete the line": "pad_to_sequence_len pad_to_multiple_of",
    "data.train_on: all or completion": (
        "train_on_inputs train_on_prompt train_on_source completion_only_loss assistant_only_loss roles_to_train"
    ),
    "data.turns: last": "mask_history",
    "data.max_rows": "max_samples max_train_samples",
    "data.eval: {fraction: 0.01} or {path: …}": (
        "val_set_size val_size test_datasets eval_dataset eval_datasets dataset_val validation_file validation_split "
        "validation_split_percentage max_eval_samples dataset_test_split"
    ),
    "data.sources: a list of {path: …, weight: …}": "mix_strategy interleave_probs",
    "always on: each epoch has its own order, drawn from seed": ("shuffle shuffle_merged_datasets shuffle_buffer_size"),
    "data.window: files are prepared and read some at a time": "streaming",
    _CACHE: (
        "dataset_num_proc dataset_processes dataset_prepared_path preprocessing_num_workers overwrite_cache "
        "tokenized_path buffer_size dataloader_* remove_unused_columns"
    ),
    # fsdp
    f"fsdp: {TABLES} lists what each of its keys is called here": "fsdp_config",
    "fsdp: ZeRO stage 3 is fsdp.strategy: FULL_SHARD, stage 2 is SHARD_GRAD_OP, stage 1 with accumulation: hold; "
    f"{TABLES} lists the rest": ("deepspeed deepspeed_config deepspeed_plugin zero_optimization zero_stage"),
    "fsdp.strategy": ("sharding_strategy fsdp_sharding_strategy fsdp_reshard_after_forward parallelism_config"),
    "fsdp.strategy: DeepSpeed's stage 3 is FULL_SHARD, 2 is SHARD_GRAD_OP, 1 with accumulation: hold; LLaMA-Factory's "
    "stage is data.format": ("stage"),
    "fsdp.shard_size: with fsdp.strategy: HYBRID_SHARD; the number of copies is derived": (
        "mics_shard_size dp_shard_size dp_replicate_size parallelism_config_dp_shard_size "
        "parallelism_config_dp_replicate_size data_parallel_shard_dim data_parallel_replicate_dim"
    ),
    "fsdp.wrap: a list of class names": (
        "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap auto_wrap_policy fsdp_auto_wrap_policy "
        "leaf_module stage3_module_granularity_threshold"
    ),
    "fsdp.wrap: {min_params: …}": "min_num_params fsdp_min_num_params",
    "fsdp.mixed_precision.param_dtype: bfloat16 (the default) or float32": "bf16 bf16_full_eval",
    "fsdp.mixed_precision.reduce_dtype": "communication_data_type",
    "fsdp.mixed_precision.param_dtype: float16, for GPUs without bfloat16": "fp16 amp float16",
    "always dynamic, as torch.amp.GradScaler's: delete the line": "loss_scale* initial_scale_power hysteresis",
    "train.float8: rowwise or tensorwise": "fp8 enable_fp8_training",
    "not supported: float32 matrix products use full float32 precision": "tf32",
    "fsdp.backward_prefetch": "fsdp_backward_prefetch fsdp_backward_prefetch_policy",
    "fsdp.forward_prefetch: the number of units to prefetch": "fsdp_forward_prefetch",
    "fsdp.cpu_offload": (
        "offload_params fsdp_offload_params fsdp_cpu_offload cpu_offload_param offload_optimizer offload_param"
    ),
    "fsdp.activation_checkpointing": (
        "gradient_checkpointing enable_activation_checkpointing fsdp_activation_checkpointing "
        "disable_gradient_checkpointing"
    ),
    "fsdp.activation_checkpointing: {kind: full, offload: true}": (
        "activation_offloading enable_activation_offloading"
    ),
    "always not reentrant: delete the line": "gradient_checkpointing_kwargs",
    _ALWAYS: (
        "use_orig_params sync_module_states limit_all_gathers fsdp_sync_module_states fsdp_use_orig_params "
        "cpu_ram_efficient_loading fsdp_cpu_ram_efficient_loading low_cpu_mem_usage overlap_comm elastic_checkpoint "
        "load_from_fp32_weights zero3_init_flag average_tokens_across_devices contiguous_gradients "
        "reduce_scatter allgather_partitions round_robin_gradients "
        "use_multi_rank_bucket_allreduce optim_state_dict save_safetensors"
    ),
    "always off: inputs have the same dtypes as in a bf16 model of transformers; delete the line": (
        "cast_forward_inputs cast_root_forward_inputs"
    ),
    "always 2 (FSDP2): delete the line": "fsdp_version",
    "derived (checkpoints are sharded, the export is full): delete the line": (
        "state_dict_type fsdp_state_dict_type fsdp_final_state_dict_type summon_full_params"
    ),
    "derived from fsdp.strategy, fsdp.shard_size and the number of ranks": "process_group device_mesh",
    "derived from the batch sizes and the label tokens: delete the line": (
        "prescale_gradients gradient_predivide_factor"
    ),
    "derived from fsdp.wrap and the prefetch keys: delete the line": (
        "reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size "
        "stage3_max_live_parameters stage3_max_reuse_distance"
    ),
    "parallel.context": (
        "context_parallel_size context_parallel_degree sequence_parallel_degree sequence_parallel_size "
        "ulysses_sequence_parallel_size parallelism_config_cp_size parallelism_config_sp_size"
    ),
    "not supported: tensors and layers are not divided among ranks": (
        "tensor_parallel_* tensor_parallel_size pipeline pipeline_* parallelism_config_tp_size megatron_lm_config"
    ),
    "fsdp.bucket_cap_mb: with fsdp.strategy: NO_SHARD": "ddp_bucket_cap_mb",
    "always on (the gradient of a shard is a part of the buffer that was reduced): delete the line": (
        "gradient_as_bucket_view ddp_gradient_as_bucket_view"
    ),
    "not needed: a parameter that the model never uses gets no gradient, and no rank waits for it; delete the line": (
        "find_unused_parameters ddp_find_unused_parameters"
    ),
    "not needed: units find their gradients anew in each backward, with recomputation too; delete the line": (
        "static_graph ddp_static_graph"
    ),
    "not supported: it is a setting of DistributedDataParallel, and this engine is FSDP2": "ddp_*",
    "not supported: training is on NVIDIA GPUs or CPUs": "xla xla_* tpu_* downcast_bf16",
    "fsdp.ignore: the parameters that every rank keeps whole, by name or pattern; only frozen ones": (
        "ignored_modules ignored_states"
    ),
    "not supported: reduced gradients have the dtype of the master weights": "keep_low_precision_grads",
    "not supported: nothing is offloaded to disk": "nvme_path buffer_count max_in_cpu fast_init aio",
    "not supported: fsdp.cpu_offload keeps parameters, gradients and optimizer state in host memory, all of them": (
        "ratio super_offload cpuadam_cores_perc convert_grad_on_cpu zenflow"
    ),
    "derived (host memory is pinned if there is a GPU): delete the line": "pin_memory cpu_offload_use_pin_memory",
    "not supported: small parameters are sharded with their unit (fsdp.wrap)": (
        "stage3_param_persistence_threshold stage3_model_persistence_threshold"
    ),
    "not supported: weights are gathered in fsdp.mixed_precision.param_dtype, gradients reduced in reduce_dtype": (
        "zero_quantized_* zeropp_loco_param"
    ),
    "fsdp.reshard_after_forward: the ranks of a node": "zero_hpz_partition_size",
    "not supported: it is a part of DeepSpeed's own implementation": (
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_partition_stream_chunk_size "
        "mics_hierarchical_params_gather ignore_unused_parameters memory_efficient_linear override_module_apply "
        "legacy_stage1 log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer compression_training"
    ),
    "not supported: fsdptrain validate --advise looks for the fastest plan that fits": (
        "autotuning auto_find_batch_size"
    ),
    "launch.nnodes: MIN:MAX lets a run go on with fewer nodes": "elasticity",
    "export.dtype: bfloat16, with export.at_end": "stage3_gather_16bit_weights_on_model_save",
    # optim and schedule
    "optim": "optimizer optim_args optimizer_params",
    "optim.lr": "learning_rate",
    "optim.betas": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.max_grad_norm": "gradient_clipping clip_grad_norm gradient_clip_val",
    "not supported (yet): training uses one learning rate for all parameters": (
        "embedding_lr embedding_lr_scale lr_groups loraplus_*"
    ),
    "not supported: the optimizers are those of optim.name": "optim_target_modules galore_* use_galore use_badam",
    "not supported: the optimizer steps after the whole backward pass, when gradients are clipped and checked": (
        "optimizer_in_bwd"
    ),
    "not supported: no noise is added to embeddings (NEFTune)": "neftune_noise_alpha noisy_embedding_alpha",
    "not supported: the loss is the cross-entropy of the next token, without smoothing": "label_smoothing_factor",
    "schedule": "lr_scheduler scheduler",
    "schedule.name: constant, linear, cosine or wsd": "lr_scheduler_type lr_scheduler_kwargs",
    "schedule.warmup: a fraction of all steps if below 1, else a number of steps": (
        "warmup_ratio warmup_steps num_warmup_steps"
    ),
    "schedule.min_lr: a fraction of optim.lr": "cosine_min_lr_ratio min_lr_ratio min_lr_rate",
    # train
    "train.epochs": "num_train_epochs num_epochs",
    "train.steps": "max_steps max_train_steps total_steps max_steps_per_epoch training_steps",
    "train.global_batch_size": "train_batch_size global_train_batch_size",
    "train.micro_batch_size": (
        "per_device_train_batch_size train_micro_batch_size_per_gpu device_batch_size per_gpu_train_batch_size"
    ),
    "train.micro_batch_size: evaluation uses it too": ("per_device_eval_batch_size eval_batch_size batch_size_val"),
    "train.micro_batch_size: sequences per rank; train.global_batch_size counts those of a whole step": "batch_size",
    "derived from train.global_batch_size and train.micro_batch_size": (
        "gradient_accumulation_steps gradient_accumulation_iters accumulate_grad_batches"
    ),
    "train.compile": "torch_compile",
    "not supported: train.compile uses torch.compile's own backend and mode": (
        "torch_compile_backend torch_compile_mode"
    ),
    "always on: a step that is not finite is repeated, and the message names the operator; delete the line": (
        "detect_anomaly debug_anomaly"
    ),
    "train.deterministic": "full_determinism cudnn_deterministic_mode",
    "seed": "data_seed random_seed",
    # eval, checkpoint, export, log
    "eval.patience": "early_stopping_patience",
    "eval.every": (
        "eval_steps eval_strategy evaluation_strategy evals_per_epoch run_val_every_n_steps validation_interval"
    ),
    "checkpoint.every": "save_steps save_strategy saves_per_epoch save_every_n_steps save_interval",
    "always the held-out loss, of which the lowest is best: delete the line": "metric_for_best_model greater_is_better",
    "checkpoint.keep": "save_total_limit keep_last_n_checkpoints",
    "checkpoint.async": "enable_async_checkpointing",
    "checkpoint.resume: auto (the default) continues from the newest valid checkpoint in output_dir": (
        "resume_from_checkpoint auto_resume_from_checkpoints recipe_checkpoint"
    ),
    "not supported: a run folder is never overwritten; choose another output_dir": "overwrite_output_dir",
    "not supported: a checkpoint has the optimizer's state, too; the export is the model alone": "save_only_model",
    "export.which: best, with checkpoint.keep_best": "load_best_model_at_end",
    "not supported: publish the export folder yourself, with hf upload": "push_to_hub hub_*",
    "name": "run_name experiment_name",
    "log.every": "logging_steps log_every_n_steps steps_per_print logging_strategy logging_first_step",
    "log.tensorboard": "use_tensorboard",
    "log.trackers": "report_to wandb use_wandb use_mlflow",
    "log.project": "wandb_project mlflow_experiment_name trackio_project",
    "not a recipe key: an environment variable of the library": "wandb_* mlflow_* trackio_*",
    "derived from output_dir: delete the line": "logging_dir",
    _REPORTS: (
        "comet_* use_comet swanlab_* use_swanlab metric_logger plot_loss "
        "log_level log_peak_memory_stats include_num_input_tokens_seen include_tokens_per_second "
        "wall_clock_breakdown comms_logger flops_profiler"
    ),
    "log.profile: {steps: [FIRST, LAST]}": "profiler profile_steps profiler_steps* profiler_enable",
    # launch
    "launch.nproc_per_node: workers on one node (num_processes / num_machines)": "num_processes",
    "launch.nnodes: start the same command on every node": "num_machines hostfile num_nodes",
    "launch.rdzv_endpoint: host:port of the first node": ("main_process_ip main_process_port master_addr master_port"),
    "always c10d, with the address of launch.rdzv_endpoint: delete the line": "rdzv_backend",
    "launch.timeout_s": "ddp_timeout",
    "derived from the machine: delete the line": (
        "compute_environment distributed_type main_training_function enable_cpu_affinity machine_rank "
        "same_network local_rank use_cpu no_cuda device device_id device_map param_init_fn "
        "gpu_memory_limit"
    ),
    "derived (a run trains, and evaluates if data.eval is set): delete the line": "do_train do_eval",
    _CODE: "trust_remote_code",
    _SECRET: "token hf_token use_auth_token hub_token",
    "not supported, except DPO: set data.format: preference, train.objective: dpo and train.dpo.beta": (
        "rl reward_model dpo_* simpo_* kto_* reward_*"
    ),
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


# (key, foreign value) → what else must be set for the recipe's value to mean the same.
HINTS = {("fsdp.strategy", "zero1"): ", with fsdp.accumulation: hold"}


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
