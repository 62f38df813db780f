#!/bin/sh
# A run in a container on one host with all of its GPUs: sh docker-run.sh recipe.yaml [key=value …]
# Stop it with Ctrl-C or `docker stop`: it saves a checkpoint and exits with 75, and the same command resumes.
set -eu

# --ipc=host: NCCL needs more than the 64 MiB of /dev/shm that a container has; --ulimit: RDMA locks memory, and gloo opens
# a file for each rank. The folder with the recipe, data and run is the same inside.
tty=$([ -t 0 ] && echo --tty || true)
exec docker run --rm --init --interactive ${tty:+"$tty"} --gpus all --ipc=host \
    --ulimit memlock=-1 --ulimit nofile=65536 --stop-timeout 300 \
    --env HF_TOKEN --env HF_HOME=/cache/huggingface --env FSDPTRAIN_CACHE=/cache/fsdptrain \
    --volume "$HOME/.cache:/cache" --volume "$PWD:$PWD" --workdir "$PWD" \
    "${IMAGE:-fsdptrain}" run "$@"
