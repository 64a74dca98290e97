#!/usr/bin/env bash
# A run on several nodes of a SLURM cluster: Ray's head and the driver on the first node, workers on all.
#
#   sbatch --nodes=2 deploy/slurm.sh teachers=qwen3_32b student.model=meta-llama/Llama-3.1-8B
#
# The arguments are those of the example; CONFIG names another recipe. Submitted again with the same RUN_DIR, it continues
# from the newest checkpoint.
#SBATCH --job-name=nemo_opd
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# SIGTERM two minutes before the end: the run finishes its step and writes a checkpoint.
#SBATCH --signal=B:TERM@120
set -euo pipefail

project=${PROJECT:-$SLURM_SUBMIT_DIR}
run_dir=${RUN_DIR:-$project/outputs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
port=${RAY_PORT:-6379}
config=${CONFIG:-configs/off_policy_distillation.yaml}
cd "$project"

# Whoever reaches Ray's ports can run code as you: it asks for a token that only you can read.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$run_dir/ray_token
mkdir -p "$run_dir"
(umask 077 && head -c 32 /dev/urandom | base64 >"$RAY_AUTH_TOKEN_PATH")

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')

trap 'kill $(jobs -p) 2>/dev/null' EXIT
ray_on() { # NODE ARGUMENTS…
  srun --nodes=1 --ntasks=1 --nodelist="$1" --overlap uv run --no-sync ray start --block "${@:2}" &
}
ray_on "${nodes[0]}" --head --node-ip-address="$head_ip" --port="$port"
for node in "${nodes[@]:1}"; do
  ray_on "$node" --address="$head_ip:$port"
done

for _ in {1..60}; do
  uv run --no-sync ray health-check --address "$head_ip:$port" 2>/dev/null && break
  sleep 2
done
# The driver waits until all nodes have joined, and stops with a message where one does not.
uv run --no-sync examples/run_off_policy_distillation.py --config "$config" \
  cluster.address="$head_ip:$port" cluster.num_nodes="${#nodes[@]}" cluster.gpus_per_node="${SLURM_GPUS_ON_NODE:-8}" \
  run.output_dir="$run_dir" run.resume=auto "$@" &
driver=$!
trap 'kill -TERM "$driver"' TERM # which SLURM sends before the time is up
status=0
wait "$driver" || status=$?
# After a signal, `wait` returns before the driver has written its checkpoint.
while kill -0 "$driver" 2>/dev/null; do
  status=0
  wait "$driver" || status=$?
done
exit "$status"
