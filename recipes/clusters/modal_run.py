# A run on Modal, in one container of 8 GPUs, which resumes after a preemption: modal run recipes/clusters/modal_run.py
# From a checkout with recipe.yaml. Data and models are on the Hub or on the volume; HF_TOKEN is in a secret.
"""A run of fsdptrain as a function of Modal."""

import subprocess

import modal

image = modal.Image.from_dockerfile("recipes/clusters/Dockerfile", context_dir=".").entrypoint([])
volume = modal.Volume.from_name("fsdptrain", create_if_missing=True)  # output_dir, data and caches, at /work
SETTINGS = modal.Secret.from_dict({"HF_HOME": "/work/hf", "FSDPTRAIN_CACHE": "/work/cache"})
app = modal.App("fsdptrain", image=image.add_local_file("recipe.yaml", "/recipe.yaml"))


@app.function(
    gpu="H100:8",
    volumes={"/work": volume},
    secrets=[modal.Secret.from_name("huggingface"), SETTINGS],
    timeout=24 * 3600,  # Modal's longest; each retry has as long
    retries=modal.Retries(max_retries=10, initial_delay=0.0),
    single_use_containers=True,
)
def train() -> None:
    """Run the recipe, or resume it."""
    command = ["fsdptrain", "run", "/recipe.yaml", "output_dir=/work/run", "launch.max_restarts=3"]
    subprocess.run(command, cwd="/work", check=True)


@app.local_entrypoint()
def main() -> None:
    """Start the function, and wait for it."""
    train.remote()
