"""Conversion of other tools' files: documented examples, hostile files, and no name that disappears in silence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import fsdptrain

from fsdptrain.config.convert import Conversion, convert
from fsdptrain.config.names import REPLACEMENTS, leading_key, replacement_of
from fsdptrain.config.reader import MAX_RECIPE_BYTES, load
from fsdptrain.config.reflection import all_paths, flat
from fsdptrain.config.tools import COPIED, COUNTED_OTHERWISE, KINDS, MEANINGS, NOTE, PART_TYPES, TOOLS
from fsdptrain.config.translate import RULES, Entry, is_empty, reason_for, settings_of
from fsdptrain.config.values import accepts
from fsdptrain.errors import RecipeError

# The examples are shortened from those of the tools' own documents.
AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
# Automatically upload checkpoint and final model to HF
# hub_model_id: username/custom_model_name

load_in_8bit: false
load_in_4bit: false

datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca

dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out

adapter: lora
lora_model_dir:

sequence_len: 2048
sample_packing: true
eval_sample_packing: true

lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules:
  - gate_proj
  - down_proj
  - up_proj
  - q_proj
  - v_proj
  - k_proj
  - o_proj

wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:

gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002

bf16: auto
tf32: false

gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true

loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3

warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1

weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_offload_params: true
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sharding_strategy: FULL_SHARD
"""

LLAMA_FACTORY = """\
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null

### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
deepspeed: examples/deepspeed/ds_z3_config.json
"""

TORCHTUNE = """\
output_dir: /tmp/torchtune/llama3_1_8B/lora
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/Meta-Llama-3.1-8B-Instruct/original/tokenizer.model
  max_seq_len: 4096
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/Meta-Llama-3.1-8B-Instruct/
  checkpoint_files: [model-00001-of-00004.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
save_adapter_weights_only: False
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False  # True increases speed
seed: null
shuffle: True
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
device: cuda
dtype: bf16
enable_activation_checkpointing: False
enable_activation_offloading: False
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
log_peak_memory_stats: True
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""

TRL = """\
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
dataset_test_split: test
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
eos_token: <|im_end|>
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
bf16: true
torch_dtype: bfloat16
attn_implementation: flash_attention_2
output_dir: Qwen2-0.5B-SFT
push_to_hub: true
report_to: [wandb]
"""

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

DEEPSPEED = """\
{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": 0.5,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "overlap_comm": true
  }
}
"""


@pytest.fixture(autouse=True)
def wandb_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("yaml" if name == "wandb" else name))


def converted(folder: Path, *texts: str) -> tuple[Conversion, dict[str, Any]]:
    """Return the conversion of files with these texts, and the values of its recipe as `load` reads them."""
    files = [folder / f"file{number}.yaml" for number in range(len(texts))]
    for path, text in zip(files, texts, strict=True):
        path.write_text(text)
    done = convert(files, folder / "recipe.yaml")
    assert done.problems == []
    (folder / "recipe.yaml").write_text(done.text)
    return done, flat(load(folder / "recipe.yaml").recipe)


EXAMPLES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "axolotl": (
        [AXOLOTL],
        {
            "model.id": "NousResearch/Llama-3.2-1B", "adapter.kind": "lora", "adapter.r": 16, "adapter.alpha": 32,
            "data.path": "teknium/GPT4-LLM-Cleaned", "data.format": "prompt_completion", "data.packing": "bfd",
            "data.columns": {"prompt": ["instruction", "input"], "completion": "output"},
            "data.eval": {"fraction": 0.1}, "data.seq_len": 2048, "fsdp.strategy": "FULL_SHARD",
            "fsdp.wrap": ["LlamaDecoderLayer"], "fsdp.cpu_offload": True, "fsdp.activation_checkpointing": "full",
            "model.attn_implementation": "auto", "optim.name": "adamw_8bit", "optim.lr": 2e-4,
            "optim.betas": [0.9, 0.999], "optim.weight_decay": 0.0, "schedule.name": "cosine", "schedule.warmup": 10,
            "schedule.min_lr": 0.0, "train.epochs": 1, "train.global_batch_size": 32, "train.micro_batch_size": 2,
        },
    ),
    "llama-factory": (
        [LLAMA_FACTORY],
        {
            "model.id": "meta-llama/Meta-Llama-3-8B-Instruct", "adapter.kind": "lora", "adapter.r": 8,
            "adapter.alpha": 16, "adapter.target": "all-linear", "data.path": "identity", "data.max_rows": 1000,
            "data.eval": {"fraction": 0.1}, "data.packing": "none", "fsdp.strategy": "FULL_SHARD", "optim.lr": 1e-4,
            "schedule.name": "cosine", "schedule.warmup": 0.1, "train.epochs": 3, "train.global_batch_size": 64,
            "eval.every": 500, "checkpoint.every": 500, "log.every": 10, "log.trackers": [],
            "launch.timeout_s": 300,
        },
    ),
    "torchtune": (
        [TORCHTUNE],
        {
            "model.id": "/tmp/Meta-Llama-3.1-8B-Instruct/", "model.dtype": "bfloat16", "adapter.kind": "lora",
            "adapter.target": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "data.path": "yahma/alpaca-cleaned", "data.format": "prompt_completion", "data.seq_len": 4096,
            "data.packing": "none", "optim.name": "adamw", "optim.lr": 3e-4, "optim.weight_decay": 0.01,
            "optim.max_grad_norm": None, "schedule.name": "cosine", "schedule.warmup": 100, "train.epochs": 1,
            "train.global_batch_size": 128, "train.micro_batch_size": 2, "fsdp.activation_checkpointing": "none",
            "output_dir": "/tmp/torchtune/llama3_1_8B/lora",
        },
    ),
    "trl with accelerate": (
        [TRL, ACCELERATE],
        {
            "model.id": "Qwen/Qwen2-0.5B", "data.path": "trl-lib/Capybara", "data.format": "chat",
            "data.train_on": "all", "data.eval": {"path": "trl-lib/Capybara::test"}, "data.packing": "bfd",
            "data.seq_len": 1024, "adapter.kind": "lora", "adapter.r": 32, "adapter.alpha": 16,
            "fsdp.strategy": "FULL_SHARD", "fsdp.activation_checkpointing": "full", "schedule.name": "linear",
            "schedule.warmup": 0, "train.global_batch_size": 2 * 8 * 4, "eval.every": 100,
        },
    ),
    "trl with deepspeed": (
        [TRL, DEEPSPEED],
        {
            "fsdp.strategy": "SHARD_GRAD_OP", "fsdp.cpu_offload": True, "optim.max_grad_norm": 0.5,
            "train.global_batch_size": 2 * 8 * 8, "train.micro_batch_size": 2,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", EXAMPLES)
def test_an_example_of_each_tool_becomes_a_recipe(tmp_path: Path, tool: str) -> None:
    texts, expected = EXAMPLES[tool]
    done, values = converted(tmp_path, *texts)
    assert {path: values[path] for path in expected} == expected
    for text in texts:  # every name at the top is converted, has a reason, or has an empty value
        for name, value in yaml.safe_load(text).items():
            named = {word.partition(".")[0] for word in (*done.converted, *done.missing)}
            assert name in named or value in (None, False, "auto", [], {}) or name == "zero_optimization", name


def test_empty_null_and_false_values_are_no_problems(tmp_path: Path) -> None:
    empty = "wandb_project:\nload_in_8bit: false\nhub_model_id: ''\nspecial_tokens: {}\nplugins: []\n"
    done, _ = converted(tmp_path, f"base_model: a/b\ndatasets: [{{path: x.jsonl, type: completion}}]\n{empty}")
    assert done.missing == {}
    done, _ = converted(
        tmp_path, "base_model: a/b\ndatasets: [{path: x.jsonl}]\ncomet_project: p\nload_in_8bit: true\n"
    )
    assert {name: reason[:13] for name, reason in done.missing.items()} == {
        "comet_project": "not supported", "load_in_8bit": "not supported"
    }  # fmt: skip


def test_a_project_of_wandb_chooses_the_tracker(tmp_path: Path) -> None:
    _, values = converted(tmp_path, "base_model: a/b\ndatasets: [{path: x.jsonl}]\nwandb_project: p\n")
    assert (values["log.trackers"], values["log.project"]) == (["wandb"], "p")


FSDP1 = "base_model: a/b\ndatasets: [{path: x.jsonl, type: chat_template, field_messages: conversations}]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp_config: {fsdp_sharding_strategy: 1}", {"fsdp.strategy": "FULL_SHARD"}),
        ("fsdp_config: {fsdp_sharding_strategy: 3}", {"fsdp.strategy": "NO_SHARD"}),
        ("fsdp_config: {fsdp_sharding_strategy: _HYBRID_SHARD_ZERO2}", {"fsdp.strategy": "HYBRID_SHARD_ZERO2"}),
        ("fsdp_config: {reshard_after_forward: false}", {"fsdp.strategy": "SHARD_GRAD_OP"}),
        ("fsdp: full_shard auto_wrap offload", {"fsdp.strategy": "FULL_SHARD", "fsdp.cpu_offload": True}),
        ("zero_optimization: {stage: 3}", {"fsdp.strategy": "FULL_SHARD"}),
        ("dp_replicate_size: 2\ndp_shard_size: 4\nmicro_batch_size: 3", {
            "fsdp.strategy": "HYBRID_SHARD", "fsdp.shard_size": 4, "train.global_batch_size": 24,
        }),
        ("fsdp_config: {fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 1000}",
         {"fsdp.wrap": {"min_params": 1000}}),
        ("fsdp_config: {fsdp_backward_prefetch: NO_PREFETCH, fsdp_forward_prefetch: true}",
         {"fsdp.backward_prefetch": "NONE", "fsdp.forward_prefetch": 1}),
        ("adam_beta2: 0.95\nmax_grad_norm: 0", {"optim.betas": [0.9, 0.95], "optim.max_grad_norm": None}),
        ("max_steps: 10\nnum_epochs: 3", {"train.steps": 10}),
        ("max_steps: -1\nnum_epochs: 3", {"train.epochs": 3, "train.steps": None}),
        ("adapter: qlora\nload_in_4bit: true\nlora_target_linear: true",
         {"adapter.kind": "qlora", "adapter.target": "all-linear"}),
        ("warmup_steps: 0\nwarmup_ratio: 0.2", {"schedule.warmup": 0.2}),
        ("train_on_inputs: true", {"data.train_on": "all", "data.columns": {"messages": "conversations"}}),
        ("bf16: false", {"fsdp.mixed_precision.param_dtype": "float32"}),
        ("fp16: true", {"fsdp.mixed_precision.param_dtype": "float16"}),
        ("optimizer: paged_adamw_8bit", {"optim.name": "adamw_8bit"}),
        ("num_machines: 2\nnum_processes: 16\nmain_process_ip: 10.0.0.1\nmain_process_port: 2950",
         {"launch.nnodes": 2, "launch.rdzv_endpoint": "10.0.0.1:2950", "train.global_batch_size": 16}),
        ("unfrozen_parameters: ['^lm_head.weight$']", {"model.trainable": ["lm_head.weight"]}),
        ("save_strategy: 'no'\nsave_steps: 50", {"checkpoint.every": None}),
        ("excess_length_strategy: truncate\ndataset_exact_deduplication: true\nchat_template: tokenizer_default",
         {"data.long_rows": "cut", "data.drop_duplicates": True, "data.chat_template": None}),
        ("mask_history: true\nchat_template_kwargs: {enable_thinking: false}",
         {"data.turns": "last", "data.chat_template_kwargs": {"enable_thinking": False}}),
        ("chat_template_jinja: '{{ messages }}'", {"data.chat_template": "{{ messages }}"}),
    ],
)  # fmt: skip
def test_a_value_means_the_same_in_the_recipe(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    _, values = converted(tmp_path, FSDP1 + text + "\n")
    assert {path: values[path] for path in expected} == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "is not a mapping of keys"),
        ("", "is not a mapping of keys"),
        ("a: !!python/object/apply:os.system [true]\n", "the YAML tag"),
        ("a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "anchors and aliases"),
        ("a: " + "x" * 1_000_000, f"larger than {MAX_RECIPE_BYTES:,} bytes"),
        ("a: {b: [\n", "is not valid YAML"),
        ("a: " + "[" * 100 + "]" * 100, "nested more than"),
        ("a: 1\na: 2\n", "is set twice"),
    ],
)
def test_a_hostile_file_is_one_error(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        convert([tmp_path / "file.yaml"], tmp_path / "recipe.yaml")
    assert len(caught.value.problems) == 1 and says in str(caught.value)


def test_values_of_any_type_never_break_the_conversion(tmp_path: Path) -> None:
    odd: list[Any] = [-1, 1.5, True, "x y", [[None]], [{"path": 3}], {"a": 1}]
    names = [name.replace("*", "x") for name in {*REPLACEMENTS, *COPIED, *MEANINGS, *RULES} if "." not in name]
    for value in odd:
        (tmp_path / "file.yaml").write_text(json.dumps(dict.fromkeys(names, value)))
        done = convert([tmp_path / "file.yaml"], tmp_path / "recipe.yaml")
        assert isinstance(yaml.safe_load(done.text), dict | None)


def test_a_secret_is_neither_written_nor_shown(tmp_path: Path) -> None:
    secret = "hf_" + "a" * 30
    text = f"base_model: a/b\nhub_token: {secret}\nrun_name: {secret}\ndatasets: [{{path: 'https://u:{secret}@h/x'}}]\n"
    (tmp_path / "file.yaml").write_text(text)
    done = convert([tmp_path / "file.yaml"], tmp_path / "recipe.yaml")
    assert secret not in done.text + "\n".join(done.report())
    assert list(done.missing) == ["hub_token", "run_name", "datasets"]


SAMPLES: list[Any] = [
    True,
    3,
    0.5,
    10,
    "bf16",
    "text",
    "lora",
    "cosine",
    "adamw_torch",
    "full_shard",
    "a/b",
    "sdpa",
    ["a"],
    {"text": "a"},
]


@pytest.mark.parametrize("name", [name for name in REPLACEMENTS if "*" not in name])
def test_every_foreign_name_is_converted_or_has_a_reason(name: str) -> None:
    reached = set()
    for value in SAMPLES:
        entry = Entry("", name, value)
        settings = settings_of(entry)
        assert settings is not None or len(reason_for(entry)) > 10 or is_empty(entry)
        reached |= set(settings or ())
    text = replacement_of(name) or ""
    if text in all_paths() and not {name} & {*COUNTED_OTHERWISE, *MEANINGS, *RULES}:
        assert reached == {COPIED.get(name, leading_key(text))}


def test_the_tables_set_values_that_the_recipe_accepts() -> None:
    tables = [*(settings for table in MEANINGS.values() for settings in table.values()), *KINDS.values()]
    tables += [tool.defaults for tool in TOOLS]
    for settings in tables:
        for path, value in settings.items():
            assert path == NOTE or path in PART_TYPES or accepts(path, value), (path, value)
    assert set(COPIED.values()) <= {*all_paths(), *(path for path in COPIED.values() if path.startswith("_"))}


def test_init_from_other_tools_says_what_became_of_every_key_and_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(TRL)
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    files = ("--from", tmp_path / "trl.yaml", "--from", tmp_path / "accelerate.yaml")
    done = fsdptrain("init", *files, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "converted (25 keys): model_name_or_path, dataset_name" in done.stdout
    assert "\n  push_to_hub: not supported: publish the export folder yourself, with hf upload\n" in done.stdout
    assert "changed or assumed:\n" in done.stdout and done.stdout.endswith(
        f"next: fsdptrain validate {tmp_path}/recipe.yaml\n"
    )
    assert load(tmp_path / "recipe.yaml").recipe.model.id == "Qwen/Qwen2-0.5B"
    done = fsdptrain("init", *files, tmp_path)
    assert done.returncode == 2 and "exists already and is not overwritten" in done.stderr
    done = fsdptrain("init", *files, "--model", "a/b", tmp_path / "other.yaml")
    assert done.returncode == 2 and "leave out --data, --model and --hardware" in done.stderr
    (tmp_path / "accelerate.yaml").write_text("data: [\n")
    done = fsdptrain("init", *files, tmp_path / "other.yaml")
    assert done.returncode == 2 and "accelerate.yaml:2: is not valid YAML" in done.stderr
    assert not (tmp_path / "other.yaml").exists()


def test_a_recipe_without_a_required_key_is_written_and_says_what_to_add(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    done = fsdptrain("init", "--from", tmp_path / "accelerate.yaml", tmp_path / "recipe.yaml")
    assert done.returncode == 0, done.stderr
    says = "data.path: is not set: give a file, a glob, a folder, a list of them, or a Hub data set"
    assert f"  {says}\n" in done.stdout and f"# to correct: {says}\n" in (tmp_path / "recipe.yaml").read_text()
