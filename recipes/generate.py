"""Generate text from an exported folder with plain transformers: `python recipes/generate.py FOLDER PROMPT`."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
folder, prompt = sys.argv[1], sys.argv[2].replace("\\n", "\n")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)  # starts as training rows do
torch.manual_seed(1)  # transformers.set_seed imports peft and bitsandbytes, which may warn about kernels
output = model.generate(
    **inputs, max_new_tokens=70, do_sample=True, temperature=0.7, top_k=40, pad_token_id=tokenizer.eos_token_id
)
print(f"--- {folder}\n{tokenizer.decode(output[0], skip_special_tokens=True)}\n")
