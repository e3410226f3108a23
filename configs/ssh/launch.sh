#!/bin/bash
# The same tmrun command on every host, over plain ssh. The first host runs the store.
#
#   HOSTS="a b c d" ACTIVE=3 configs/ssh/launch.sh train.py --epochs 3
#
# Needs: the same paths and the same environment on every host, keys for ssh, and the job's secret in ~/.tmrun-secret on each of them
# ((umask 077; openssl rand -hex 16 > ~/.tmrun-secret), then scp it: it never appears on a command line).
# Checked with shellcheck; not yet run on a real cluster.
set -euo pipefail

read -r -a ALL <<< "$HOSTS"
ACTIVE="${ACTIVE:-$((${#ALL[@]} - 1))}"
STANDBY="$((${#ALL[@]} - ACTIVE))"
COMMAND="$(printf '%q ' tmrun run --job "${JOB:-ssh}" --nnodes "$ACTIVE" --nproc-per-node "${NPROC:-8}" --standby "$STANDBY" \
  --rdzv-endpoint "${ALL[0]}:${PORT:-29400}" --secret-file "$HOME/.tmrun-secret" "$@")"

# -tt: when this script ends, so does what it started. The first host that fails does not end the others.
for TARGET in "${ALL[@]}"; do
  ssh -tt -o BatchMode=yes "$TARGET" "cd $(printf '%q' "$PWD") && $COMMAND" < /dev/null &
done
wait
