# A run on Modal, in one container of 8 GPUs, which resumes when it is preempted: modal run recipes/clusters/modal_run.py
# From a checkout with recipe.yaml; its data and models are in the volume or on the Hub. HF_TOKEN is the secret `huggingface`.
import subprocess

import modal

image = modal.Image.from_dockerfile("recipes/clusters/Dockerfile", context_dir=".").entrypoint([])
volume = modal.Volume.from_name("fsdptrain", create_if_missing=True)  # output_dir, data and caches, at /work
app = modal.App("fsdptrain", image=image.add_local_file("recipe.yaml", "/recipe.yaml"))


@app.function(
    gpu="H100:8",
    volumes={"/work": volume},
    secrets=[modal.Secret.from_name("huggingface"), modal.Secret.from_dict({"HF_HOME": "/work/hf"})],
    timeout=24 * 3600,  # Modal's longest; each retry has as long
    retries=modal.Retries(max_retries=10, initial_delay=0.0),
    single_use_containers=True,
)
def train() -> None:
    command = ["fsdptrain", "run", "/recipe.yaml", "output_dir=/work/run", "launch.max_restarts=3"]
    subprocess.run(command, cwd="/work", check=True)


@app.local_entrypoint()
def main() -> None:
    train.remote()
