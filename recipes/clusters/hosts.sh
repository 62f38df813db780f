#!/bin/sh
# A run on plain hosts, started from one of them or from anywhere: HOSTS="a b" sh hosts.sh recipe.yaml [key=value …]
# The hosts share this folder and output_dir. The first one is where they meet: PORT must be open there, and other ports
# between them (docs/clusters.md, "Ports").
# shellcheck disable=SC2029
set -eu

count=$(echo "$HOSTS" | wc -w) first=$(echo "$HOSTS" | awk '{print $1}')
set -- "$@" "launch.nnodes=$((count))" "launch.rdzv_endpoint=${first##*@}:${PORT:-29400}"
words=''
for word in "$@"; do words="$words '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"; done
trap 'kill $(jobs -p)' INT TERM # ssh -tt: each host gets a hangup, and saves
for host in $HOSTS; do
    ssh -tt "$host" "cd '$PWD' && fsdptrain run $words" </dev/null &
done
wait
