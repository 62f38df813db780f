"""Hostile artefacts: code in a model, a tokenizer or a template, which would leave a file behind, is never run.

Each test builds a small, valid model folder, damages it, and then does what a run does with it: load the tokenizer, the
data, the configuration, the skeleton and the headers of the weights, and write the files of the folder again.
"""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TINY, Payload, fsdptrain, quiet, write_recipe
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from fsdptrain.checkpoint.export_check import open_model
from fsdptrain.config.reader import load
from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE
from fsdptrain.data.hub import safetensors_files
from fsdptrain.data.prepare import prepare
from fsdptrain.data.tokenizer import load_tokenizer, own_code_note, train_bpe
from fsdptrain.errors import FsdptrainError, RecipeError
from fsdptrain.inference.opened import opened_model
from fsdptrain.model.config import LIMITS, load_config, own_classes, position_limit, save_assets
from fsdptrain.model.skeleton import skeleton
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen

TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "model"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    tokenizer = train_bpe(iter(["hello there"]), 300)
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def plan_of(folder: Path, trust: bool = False, **changes: Any) -> Plan:
    """Return the plan of a run that fine-tunes the model in `folder`/model on one conversation."""
    (folder / "talk.jsonl").write_text(json.dumps(TALK) + "\n")
    wanted = {
        "model": {"id": str(folder / "model")}, "data__format": "chat", "data__path": str(folder / "talk.jsonl"),
        **changes,
    }  # fmt: skip
    written = load(write_recipe(folder, **wanted))
    return make_plan(written, find_topology(written.recipe, {}), trust_remote_code=trust)


def prepare_run(folder: Path, **changes: Any) -> None:
    """Do what a run does with the model folder before it creates a process group, and write the model's files."""
    plan = plan_of(folder, **changes)
    tokenizer = load_tokenizer(plan, quiet)
    prepare(plan, tokenizer, quiet)
    config = load_config(plan, len(tokenizer))
    safetensors_files(plan)
    save_assets(plan, config, skeleton(config, plan.recipe.model), tokenizer, folder / "written")


def refusal(folder: Path, **changes: Any) -> str:
    """Return the message with which the run is refused: a single line of an FsdptrainError."""
    with pytest.raises(FsdptrainError) as caught:
        prepare_run(folder, **changes)
    message = str(caught.value)
    assert message.strip()
    assert len(message.splitlines()) == 1, message
    return message


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


def evil(canary: Path) -> str:
    return f"import pathlib; pathlib.Path({str(canary)!r}).touch()\nclass Evil: pass\n"


# --- pickles ---------------------------------------------------------------------------------------------------------


def test_a_pickle_in_a_model_folder_is_never_read(model: Path, tmp_path: Path, canary: Path) -> None:
    used = ("tokenizer.json", "tokenizer_config.json", "model.safetensors", "config.json")
    for name in (*used, "pytorch_model.bin", "tokenizer.model", "training_args.bin"):
        before = (model / name).read_bytes() if name in used else b""
        (model / name).write_bytes(pickle.dumps(Payload(canary)))
        if name in used:
            refusal(tmp_path)
            (model / name).write_bytes(before)
        else:
            prepare_run(tmp_path)
    (model / "model.safetensors").unlink()  # only pickled weights are left
    torch.save({"model.norm.weight": Payload(canary)}, model / "pytorch_model-00001-of-00001.bin")
    assert "has no safetensors weights" in refusal(tmp_path)
    (model / "tokenizer.json").unlink()  # only tokenizer.model is left, which sentencepiece wants
    refusal(tmp_path)
    assert not canary.exists()
    pickle.loads((model / "training_args.bin").read_bytes())
    assert canary.exists(), "the payload is not a live one"


# --- code of its own -------------------------------------------------------------------------------------------------


def with_code(model: Path, canary: Path, **config: Any) -> None:
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "custom_generate/generate.py"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(evil(canary))
    named = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    rewrite(model / "config.json", **{"auto_map": named, **config})
    rewrite(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_evil.Evil"]})


@pytest.mark.parametrize("change", [{"model_type": "evil"}, {"architectures": ["EvilForCausalLM"]}])
def test_own_code_is_refused_with_the_flag(model: Path, tmp_path: Path, canary: Path, change: dict[str, Any]) -> None:
    with_code(model, canary, **change)
    assert "has custom code, which is not run: read the code, then pass --trust-remote-code" in refusal(tmp_path)
    assert not canary.exists()


def test_code_for_an_architecture_that_is_known_is_only_used_if_it_is_trusted(
    model: Path, tmp_path: Path, canary: Path
) -> None:
    def notes() -> list[str | None]:
        plan = plan_of(tmp_path)
        made = [load_tokenizer(plan, quiet), skeleton(load_config(plan, None), plan.recipe.model)]
        return [own_code_note(each) for each in made]

    assert notes() == [None, None]
    with_code(model, canary)
    assert notes() == [
        "model.tokenizer: its own code (tokenization_evil.Evil) is not run: TokenizersBackend of transformers is used",
        "model.id: its own code (modeling_evil.Evil) is not run: LlamaForCausalLM of transformers is used",
    ]
    prepare_run(tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "written" / name).read_text())
    assert own_classes(str(model), None, trusted=False) == {}
    assert own_classes(str(model), None, trusted=True).keys() == {"AutoConfig", "AutoModelForCausalLM"}
    assert not canary.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_a_tokenizers_code_is_never_run(model: Path, tmp_path: Path, canary: Path, trust: bool) -> None:
    rewrite(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_evil.Evil"]})
    (model / "tokenization_evil.py").write_text(evil(canary))
    load_tokenizer(plan_of(tmp_path, trust), quiet)
    with opened_model(RunDir.open(model), None, None, trust, Screen(quiet=True)) as opened:  # of `chat` and `eval`
        assert own_code_note(opened.tokenizer)
    rewrite(model / "config.json", model_type="evil")
    rewrite(model / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    with pytest.raises(RecipeError, match="own code, which is never run: name a folder") as caught:
        load_tokenizer(plan_of(tmp_path, trust), quiet)
    assert "--trust-remote-code" not in str(caught.value)
    assert not canary.exists()


def test_code_of_another_repository_is_refused_even_with_the_flag(model: Path, tmp_path: Path, canary: Path) -> None:
    with_code(model, canary, model_type="evil", auto_map={"AutoConfig": "evil/repo--configuration_evil.Evil"})
    plan = plan_of(tmp_path, trust=True)
    with pytest.raises(RecipeError, match="another repository"):
        load_config(plan, None)
    with pytest.raises(RecipeError, match="another repository"):
        open_model(str(model), torch.float32, trust_remote_code=True)
    assert not canary.exists()


def test_the_base_of_an_adapter_runs_its_code_from_a_fixed_commit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.Evil"}}
    monkeypatch.setattr("fsdptrain.model.config.read_json", lambda *_: config)
    with pytest.raises(RecipeError, match="full commit"):
        own_classes("org/base", "main", trusted=True)
    assert own_classes("org/base", "0" * 40, trusted=True)


def test_the_flag_needs_a_full_commit_or_a_folder_and_is_in_the_plan(model: Path, tmp_path: Path) -> None:
    def hub(revision: str | None) -> dict[str, Any]:
        return {"model": {"id": "org/name", "revision": revision}}

    for revision in (None, "main", "v1.0", "abc1234", "A" * 40, "f" * 39, "f" * 41):
        with pytest.raises(RecipeError, match=r"model\.revision.*full commit"):
            plan_of(tmp_path, trust=True, **hub(revision))
        assert not plan_of(tmp_path, **hub(revision)).trust_remote_code
    for changes in (hub("0123456789abcdef" * 2 + "01234567"), {}):
        assert Plan.from_json(plan_of(tmp_path, trust=True, **changes).to_json()).trust_remote_code


# --- chat templates --------------------------------------------------------------------------------------------------

OUT = "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('CANARY') }}"
TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    OUT, OUT.replace("self", "cycler"), OUT.replace("self", "lipsum"), OUT.replace("self", "raise_exception"),
    "{{ ('%s' | attr('__class__')).__base__.__subclasses__() }}", "{{ messages.append(1) }}",
    "{% for i in range(10**9) %}x{% endfor %}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}",
    "{{ undefined.call() }}", "{% for", "{{ 1 / 0 }}", "{{ messages[0].content.__class__.__base__ ~ 1 }}{{ 1/0 }}",
    "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}{{ raise_exception('end') }}",
]  # fmt: skip


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'a' * 10**11 }}",
        "{% set x = namespace(t='a') %}{% for a in range(60) %}{% set x.t = x.t ~ x.t %}{% endfor %}{{ x.t }}",
        "{{ 'a'.center(10**11) }}",
        "{{ 10 ** (10 ** (9 + messages | length)) }}",
    ],
    ids=["loops", "recursion", "product", "doubling", "method", "power"],
)
def test_a_template_that_never_ends_is_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr("fsdptrain.data.chat.TEMPLATE_S", 1)
    (model / "chat_template.jinja").write_text(template)
    started = time.perf_counter()
    assert "chat template" in refusal(tmp_path)
    assert time.perf_counter() - started < 20


# --- files that are not what they say --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "config.json", "added_tokens.json"])
def test_a_link_out_of_the_folder_is_not_followed(model: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "token"
    shutil.copy(model / name, outside) if (model / name).exists() else outside.write_text("hf_secret")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(outside)
    assert f"{name} is a link to a file outside its folder" in refusal(tmp_path)


def test_links_inside_the_hubs_cache_and_linked_weights_are_accepted(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for path in model.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (blobs / "model.safetensors").rename(tmp_path / "weights")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "weights")
    prepare_run(tmp_path, model={"id": str(snapshot)})


INDEX = "model.safetensors.index.json"


INDEXES = [
    ('{"metadata": {}, "weight_map": {"a": "../outside.safetensors"}}', "outside its folder"),
    ('{"metadata": {}, "weight_map": {"a": "/etc/passwd"}}', "outside its folder"),
    ('{"metadata": {}, "weight_map": {"a": "sub/x.safetensors"}}', "outside its folder"),
    ('{"metadata": {}, "weight_map": {"a": "missing.safetensors"}}', "missing.safetensors cannot be read"),
    ('{"metadata": {}, "weight_map": {"a": ""}}', "cannot be read"),
    ('{"metadata": {}, "weight_map": {"a": 5}}', INDEX),
    ('{"metadata": {}, "weight_map": ["model.safetensors"]}', INDEX),
    ('{"weight_map": {"a": "model.safetensors"}}', "metadata"),
    *((text, INDEX) for text in ("{}", "[]", "", "[" * 100_000)),
]


def tensors(header: str | bytes, length: int | None = None, data: bytes = b"") -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(start: int, end: int, shape: object = (1,), dtype: str = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [start, end]})


HEADERS = [
    b"", b"\0" * 7, b"\0" * 8, tensors("{}", length=2**63), tensors("{}", length=2**40), tensors("{}", length=10**9),
    tensors(f'{{"a": {entry(0, 4)}, "b": {entry(0, 4)}}}', data=b"\0" * 4),
    tensors(f'{{"a": {entry(0, 2**62, [2**60])}}}', data=b"\0" * 4),
    tensors(f'{{"a": {entry(4, 0)}}}', data=b"\0" * 4),
    tensors(f'{{"a": {entry(0, 4, [2**63, 2])}}}', data=b"\0" * 4),
    tensors(f'{{"a": {entry(0, 4, [-1])}}}', data=b"\0" * 4),
    tensors(f'{{"a": {entry(0, 4, dtype="os.system")}}}', data=b"\0" * 4),
    tensors(f'{{"a": {entry(0, 4)}}}', data=b""), tensors('{"a": ' * 50_000), tensors("[" * 50_000),
    tensors(b"\xff" * 100), tensors("null"), pickle.dumps({"a": 1}),
]  # fmt: skip
FILES = [
    *(("chat_template.jinja", template.encode(), "chat template") for template in TEMPLATES),
    *((INDEX, text.encode(), message) for text, message in INDEXES),
    *(("model.safetensors", raw, "model.safetensors cannot be read as safetensors") for raw in HEADERS),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=range(len(FILES)))
def test_a_hostile_file_is_refused(
    model: Path, tmp_path: Path, canary: Path, name: str, content: bytes, message: str
) -> None:
    (model / name).write_bytes(content.replace(b"CANARY", str(canary).encode()))
    assert message in refusal(tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: 2 * limit}, "not a") for name, limit in LIMITS.items() if name in TINY),
        ({"hidden_size": 10**9}, "hidden_size: 1000000000 is not a whole number from 1 to"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"), ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"), ({"hidden_size": -64}, "hidden_size"), ({"hidden_size": 0}, "hidden"),
        ({"hidden_size": "64"}, "hidden_size"), ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_attention_heads": 0}, "config"), ({"num_attention_heads": 3}, "config"),
        ({"dtype": "os.system"}, "config"), ({"dtype": "garbage"}, "config"), ({"hidden_act": "os.system"}, "os"),
        ({"rope_parameters": {"rope_type": "evil"}}, "evil"), ({"rope_parameters": [1]}, "rope_parameters"),
        ({"model_type": "nope"}, "nope"), ({"model_type": 5}, "5"), ({"model_type": None}, "None"),
        ({"auto_map": 5}, "cannot load"), ({"pad_token_id": 10**9}, "config"), ({"id2label": {"a": []}}, "config"),
        ({"vocab_size": 100}, "vocab_size: 100, but the tokenizer has 265 tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_configuration_is_refused(model: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rewrite(model / "config.json", **change)
    assert message in refusal(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB: nothing large was allocated


@pytest.mark.parametrize("text", ["", "[]", "5", "null", "{", "[" * 100_000, '{"a":' * 5000, "\0", "\xff"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_of_garbage_is_refused_or_ignored(model: Path, tmp_path: Path, name: str, text: str) -> None:
    (model / name).write_bytes(text.encode("latin1"))
    try:
        prepare_run(tmp_path)
    except FsdptrainError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"temperature": "hot"}', '{"temperature": 0.5, "do_sample": false}', "\xff"]
)
def test_a_generation_config_that_cannot_be_used_is_replaced(model: Path, tmp_path: Path, text: str) -> None:
    (model / "generation_config.json").write_bytes(text.encode("latin1"))
    prepare_run(tmp_path)
    json.loads((tmp_path / "written" / "generation_config.json").read_text())


# --- positions -------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("kind", "keys", "limit"),
    [
        ("llama", {"max_position_embeddings": 256}, 256),
        ("gpt2", {"n_positions": 128}, 128),
        ("opt", {"max_position_embeddings": 64}, 64),  # its table has two rows more, which are an offset
        ("gptj", {"n_positions": 64}, 64),
        ("bloom", {}, None),
        ("mpt", {"max_seq_len": 64}, None),  # alibi
        ("mamba", {}, None),
        ("falcon", {"alibi": True, "max_position_embeddings": 64}, None),
        ("qwen2", {"max_position_embeddings": 128, "rope_parameters": YARN}, 512),
    ],
)
def test_the_position_limit_of_an_architecture(kind: str, keys: dict[str, Any], limit: int | None) -> None:
    assert position_limit(AutoConfig.for_model(kind, **keys)) == limit


# --- secrets ---------------------------------------------------------------------------------------------------------

WORD = "canary-52d1e7b0"
NAMES = [
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "GITHUB_TOKEN", "OPENAI_API_KEY", "AZURE_CLIENT_SECRET", "DATABASE_PASSWORD",
]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "name: hf_" + "a1B2" * 9, "# my token: hf_" + "a1B2" * 9,
        "data: {path: https://me:hf_" + "a1B2" * 9 + "@hub/x}",
        "data: {path: https://me:password@host/x.jsonl}", "name: ghp_" + "a1B2" * 9, "name: AKIAABCDEFGHIJKLMNOP",
        "output_dir: runs/sk-" + "a1B2" * 9,
    ],
)  # fmt: skip
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(tmp_path: Path, line: str) -> None:
    path = tmp_path / "recipe.yaml"
    written = [
        (f"seed: x\n{line}\n", [], r"recipe\.yaml:2"),
        ("seed: 1\n", [f"name={line}"], "command line: override 1"),
    ]
    for text, words, where in written:
        path.write_text(text)
        with pytest.raises(RecipeError, match=rf"{where}:? seems to contain a secret") as caught:
            load(path, words)
        assert not any(part in str(caught.value) for part in ("a1B2", "password", "AKIA"))
    # What only resembles a secret is accepted.
    path.write_text("name: hf_run_3\nmodel: {id: org/sk-small}\ndata: {path: data/ghp_notes.jsonl}\n")
    assert load(path).recipe.name == "hf_run_3"


# --- runs ------------------------------------------------------------------------------------------------------------

MODELING = """
from transformers import LlamaForCausalLM
from .scaling_own import SCALE

class OwnForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        print("the model's own code runs")
        return super().forward(*args, **kwargs)
"""


@pytest.fixture(scope="module")
def runs(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run a model with its own code and secrets around, then resume it without the flag, and with other code."""
    tmp = tmp_path_factory.mktemp("own")
    model = Path(shutil.copytree(sound, tmp / "model"))
    (model / "modeling_own.py").write_text(MODELING)
    (model / "scaling_own.py").write_text("SCALE = 1.0\n")
    named = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    rewrite(model / "config.json", auto_map=named)
    rewrite(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]})
    recipe = write_recipe(
        tmp, model={"id": str(model)}, train__steps=2, train__loss="plain", launch__nproc_per_node=1,
        log__trackers=["tensorboard"],
    )  # fmt: skip
    secrets = dict.fromkeys(NAMES, WORD)
    with_flag = fsdptrain("run", recipe, "--trust-remote-code", **secrets)
    without = fsdptrain("run", recipe, "train.steps=3")
    (model / "scaling_own.py").write_text("SCALE = 2.0\n")
    changed = fsdptrain("run", recipe, "train.steps=3", "--trust-remote-code")
    return {"with": with_flag, "without": without, "changed": changed, "folder": tmp / "run", "model": model}


def test_a_model_with_own_code_trains_with_the_flag_and_its_code_is_in_the_export(runs: dict[str, Any]) -> None:
    assert runs["with"].returncode == 0, runs["with"].stderr
    assert "the model's own code runs" in (runs["folder"] / "logs" / "rank-0.log").read_text()
    assert "its own code (tokenization_own.Own) is not run" in runs["with"].stdout
    assert "its own code (modeling_own" not in runs["with"].stdout
    export = runs["folder"] / "export"
    written = json.loads((export / "config.json").read_text())
    assert written["auto_map"]["AutoModelForCausalLM"] == "modeling_own.OwnForCausalLM"
    assert (export / "modeling_own.py").read_text() == MODELING and (export / "scaling_own.py").exists()


def test_an_export_needs_the_flag_too(runs: dict[str, Any], tmp_path: Path) -> None:
    words = ("export", runs["folder"], "--out", tmp_path / "out")
    refused = fsdptrain(*words)
    assert (refused.returncode, "pass --trust-remote-code" in refused.stderr) == (2, True)
    done = fsdptrain(*words, "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "modeling_own.py").read_text() == MODELING


def test_a_run_is_not_resumed_without_the_flag_or_with_other_code(runs: dict[str, Any]) -> None:
    assert runs["without"].returncode == runs["changed"].returncode == 2, runs["changed"].stdout
    assert "--trust-remote-code" in runs["without"].stderr and "Traceback" not in runs["without"].stderr
    assert "model.id: its own code differs" in runs["changed"].stderr and "scaling_own.py" in runs["changed"].stderr


def test_no_secret_of_the_environment_is_in_a_file_or_on_the_screen(runs: dict[str, Any]) -> None:
    assert WORD not in runs["with"].stdout + runs["with"].stderr
    files = [path for path in runs["folder"].rglob("*") if path.is_file()]
    assert {"recipe.yaml", "plan.json", "metrics.jsonl", "rank-0.log"} <= {path.name for path in files}
    assert [path for path in files if WORD.encode() in path.read_bytes()] == []
