"""Print how many rows models answer exactly, with plain transformers: `python recipes/score.py ROWS FOLDER …`.

ROWS has one {"prompt", "completion"} a line; prompt and completion are separated by a blank line, as in the recipe
`speakers`. Decoding is greedy. A FOLDER may hold an adapter: transformers opens it on its base with peft.
"""

import json
import logging
import sys
from pathlib import Path

# peft imports what is installed, which warns of kernels that this machine does not have; none are used.
for name in ("bitsandbytes.backends.cpu.ops", "torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

BATCH = 50


def answer(folder: str, prompts: list[str]) -> list[str]:
    """Return what the model in this folder writes behind each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for start in range(0, len(prompts), BATCH):
        batch = [prompt + "\n\n" for prompt in prompts[start : start + BATCH]]
        inputs = tokenizer(batch, return_tensors="pt", padding=True, return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        answers += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def main(rows: Path, *folders: str) -> None:
    """Print the first prompt, and for each folder its answer and the share of exact answers."""
    disable_progress_bar()
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    prompts, completions = [line["prompt"] for line in lines], [line["completion"] for line in lines]
    print(f"--- {rows}: the first of {len(lines)} rows\n{prompts[0]}\n\nexpected: {completions[0]}")
    for folder in folders:
        answers = answer(folder, prompts)
        exact = sum(found == expected for found, expected in zip(answers, completions, strict=True))
        print(f"{exact / len(lines):6.1%} exact, first answer {answers[0]!r}: {folder}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
