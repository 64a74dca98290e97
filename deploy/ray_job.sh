#!/usr/bin/env bash
# A run as a job of a Ray cluster that is up already, whose nodes have the project's environment (such as the image of Dockerfile).
#
#   RAY_ADDRESS=http://head:8265 deploy/ray_job.sh NODES [arguments of the example]
#
# The log is followed until the job ends. Needs `ray[default]` where it is called.
set -euo pipefail
[[ ${1:-} =~ ^[0-9]+$ ]] || {
  echo "usage: RAY_ADDRESS=http://head:8265 $0 NODES [arguments of the example]" >&2
  exit 2
}
nodes=$1
shift
project=${PROJECT:-/opt/nemo_opd}
exec ray job submit --address "${RAY_ADDRESS:?name the cluster, such as http://head:8265}" -- \
  python "$project/examples/run_off_policy_distillation.py" --config "$project/configs/off_policy_distillation.yaml" \
  cluster.address=auto cluster.num_nodes="$nodes" "$@"
