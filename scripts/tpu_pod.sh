#!/bin/bash
# One training run on a slice of Cloud TPU VMs: the same command on every worker (host) at once.
#
#   export TPU=my-pod ZONE=us-east5-a GATTN_HOME=gs://my-bucket/gattn     # and PROJECT, if not gcloud's own
#   scripts/tpu_pod.sh setup                                              # copies the last commit, makes ~/gattn/.venv
#   scripts/tpu_pod.sh train --preset dense_1p7b_28l --gate g1_headwise --mesh data=4,fsdp=8
#   scripts/tpu_pod.sh stop                                               # SIGTERM: it stops with a checkpoint
#
# The run lives in the bucket, which all workers share, so `train` goes on from its newest checkpoint, on this slice or on
# another. It starts training in the background, where a lost connection cannot end it, and shows worker 0's log; called
# again while it trains, it only shows the log. After a preemption, or maintenance, the same command goes on; if the
# machines are new, `setup` comes first. Queued resources bring them, spot ones, too, once there is room:
#
#   gcloud compute tpus queued-resources create my-request --node-id "$TPU" --zone "$ZONE" --spot \
#     --accelerator-type v5p-64 --runtime-version v2-alpha-tpuv5
#   gcloud compute tpus queued-resources describe my-request --zone "$ZONE"    # until ACTIVE; SUSPENDED: preempted,
#   gcloud compute tpus queued-resources delete my-request --zone "$ZONE" --force    # then delete it and create it again
# shellcheck disable=SC2016  # what stands in single quotes is for the workers
set -euo pipefail

fail() {
  echo "tpu_pod.sh: $1" >&2
  exit 2
}

on_workers() { # which ones, what
  gcloud compute tpus tpu-vm ssh "$TPU" "${place[@]}" --worker="$1" --command="$2"
}

step=${1:-}
[ "$#" -gt 0 ] && shift
[[ $step =~ ^(setup|train|stop)$ ]] || fail "say setup, train or stop (see the top of this file)"
[ -n "${TPU:-}" ] || fail "TPU is not set: the name of the TPU VM"
[ -n "${ZONE:-}" ] || fail "ZONE is not set: where it is, such as us-east5-a"
[[ ${GATTN_HOME:-} == gs://* ]] || fail "GATTN_HOME = '${GATTN_HOME:-}': give gs://bucket/folder, which all workers see"
place=(--zone="$ZONE" ${PROJECT:+--project="$PROJECT"})

case $step in
  setup)
    archive=$(mktemp -d)/gattn.tar.gz
    trap 'rm -r "$(dirname "$archive")"' EXIT
    git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$TPU:gattn.tar.gz" "${place[@]}" --worker=all
    on_workers all 'set -e; mkdir -p gattn; tar xzf gattn.tar.gz -C gattn; cd gattn
      for python in python3.12 python3.13 python3.11 python3; do
        $python -c "import sys, venv; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && break
      done
      test -x .venv/bin/python || $python -m venv .venv
      .venv/bin/python -m pip install --quiet -e ".[tpu,gcs]"
      .venv/bin/python -c "import gattn; print(\"ready\")"'
    ;;
  train)
    [ "$#" -gt 0 ] || fail "train: say what, such as --preset NAME --mesh data=4,fsdp=8"
    command=$(printf '%q ' .venv/bin/python -m gattn train "$@" --distributed auto)
    # The lock is held as long as training lasts, by whatever process $! has become.
    on_workers all "cd gattn && export GATTN_HOME=$(printf '%q' "$GATTN_HOME") &&
      if flock --nonblock train.lock true; then
        setsid nohup flock --no-fork train.lock $command >>train.log 2>&1 </dev/null &
        echo \$! >train.pid; sleep 1
      fi"
    # Until training ends; Ctrl-C ends the watching alone.
    on_workers 0 'cd gattn && tail -n 20 -F --pid="$(cat train.pid)" train.log'
    ;;
  stop)
    on_workers all 'cd gattn && if flock --nonblock train.lock true; then echo "nothing to stop"
      else kill -TERM "$(cat train.pid)"; fi'
    ;;
esac
