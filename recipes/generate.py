"""A few lines from a trained folder, with plain transformers: `python recipes/generate.py runs/gsm8k-sft/export`."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

PROMPTS = ("ROMEO:\n", "Tom has 3 boxes with 12 pencils each. He gives away 6 pencils. How many pencils are left?\n")

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
set_seed(1)
for prompt in PROMPTS:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
    output = model.generate(
        **inputs, max_new_tokens=60, do_sample=True, temperature=0.8, top_k=50, pad_token_id=tokenizer.eos_token_id
    )
    print(f"\n--- {tokenizer.decode(output[0], skip_special_tokens=True)}")
