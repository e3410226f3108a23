#!/bin/bash
# Drain nodes of a running Slurm job, named as Slurm names them, from any host that has the job's secret:
#
#   configs/slurm/drain.sh 4711 'node[3-4]' "ECC, ticket 8812"
#
# Checked with shellcheck; not yet run on a real cluster.
set -euo pipefail

JOB="$1"
NODES="$2"
REASON="$3"
PORT="${PORT:-29400}"
export TMRUN_SECRET
TMRUN_SECRET="$(cat "${SECRET_FILE:-$HOME/.tmrun-secret}")"

mapfile -t HOSTS < <(scontrol show hostnames "$(squeue --noheader --format %N --jobs "$JOB")")
STORE="$(printf "%s:${PORT}," "${HOSTS[@]:0:3}")"
exec tmrun drain "$NODES" --job "slurm-$JOB" --etcd "${STORE%,}" --reason "$REASON"
