"""How the runs of a sweep are started: here, as Slurm jobs, or not at all (`print`: the commands that would).

Whatever starts them, a run is its folder: one that is finished is skipped, one that was cut goes on from its newest
checkpoint, and tables are made from `result.json` alone. A Slurm job is asked for a checkpoint (SIGTERM) two minutes
before its time is up or, where the cluster grants grace, before it is preempted; `gattn train` answers with exit code
143, and the job puts itself back into the queue until the run is finished.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from experiments.runner import Job, Outcome, Run, View, jobs_by_folder, last_lines, run_all, train_command, whereabouts
from gattn.config import ConfigError, MeshConfig, at_least, check_types, to_json
from gattn.files import write_atomically

Launcher = Literal["local", "slurm", "print"]
NOTICE_S = 120  # between Slurm's SIGTERM and the end of the job's time
POLL_S = 10.0  # between two questions to Slurm, which serves others too
OURS = {"array", "error", "job-name", "mem", "no-requeue", "ntasks", "open-mode", "output", "requeue", "signal", "time"}

# The last lines of a job. A job that its owner cancels is not running any more when its trainer ends, and stays away.
REQUEUE = (
    "code=$?",
    'if [ "$code" = 143 ] && [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then',
    '  scontrol requeue "$SLURM_JOB_ID"',
    "fi",
    'exit "$code"',
)


@dataclass(frozen=True)
class SlurmOptions:
    """What the job of each run asks Slurm for; for the launcher `slurm`."""

    partition: str = ""
    """Partition; empty, like account and qos: the cluster's default."""
    account: str = ""
    """Account the time is charged to."""
    qos: str = ""
    """Quality of service."""
    nodes: int = 1
    """Nodes of a job."""
    tasks_per_node: int = 1
    """Processes per node; where a job has several processes with GPUs, one per GPU."""
    gpus_per_node: int = 0
    """GPUs per node."""
    cpus_per_task: int = 1
    """Cores of each process."""
    mem_gb: int = 0
    """Memory per node; 0: the cluster's default."""
    minutes: int = 60
    """Time limit of a job, after which it queues again until its run is finished."""
    mesh: str = ""
    """How a run's devices divide the work, as in `python -m gattn train --mesh data=2,fsdp=4`."""
    setup: tuple[str, ...] = ()
    """Shell lines before training, such as "module load cuda"."""
    extra: tuple[str, ...] = ()
    """More options of sbatch, such as reservation=mine exclude=node7 exclusive."""
    wait: bool = True
    """Wait for the jobs, then report; otherwise the same command reports later."""

    def __post_init__(self):
        check_types(self)
        at_least(self, 1, "nodes", "tasks_per_node", "cpus_per_task")
        at_least(self, 0, "gpus_per_node", "mem_gb")
        if self.minutes * 60 < 2 * NOTICE_S:
            remedy = f"give at least {2 * NOTICE_S // 60}: training is asked to stop {NOTICE_S // 60} minutes before"
            raise ConfigError("minutes", self.minutes, remedy)
        if self.processes > 1 and self.gpus_per_node not in (0, self.tasks_per_node):
            remedy = f"several processes take one GPU each: set it to gpus_per_node = {self.gpus_per_node}"
            raise ConfigError("tasks_per_node", self.tasks_per_node, remedy)
        MeshConfig.parse(self.mesh)
        taken = OURS | {name.replace("_", "-") for name in vars(self)} | {"ntasks-per-node"}
        for option in self.extra:
            name = option.partition("=")[0]
            if not name or name.startswith("-") or name.replace("_", "-") in taken:
                remedy = (
                    "give name=value as in sbatch --name=value; what has a field here, and time and signal, are set"
                )
                raise ConfigError("extra", option, remedy)

    @property
    def processes(self) -> int:
        """Of one job."""
        return self.nodes * self.tasks_per_node

    def parameters(self, run: Run) -> dict[str, Any]:
        """The job of this run in the words of `submitit.SlurmExecutor.update_parameters`."""
        optional = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "gpus_per_node": self.gpus_per_node,
            "mem": f"{self.mem_gb}GB" if self.mem_gb else "",
        }
        extra = {
            name: value if sign else True for name, sign, value in (option.partition("=") for option in self.extra)
        }
        exports = [f"export {name}={shlex.quote(value)}" for name, value in whereabouts().items()]
        return {name: value for name, value in optional.items() if value} | {
            "job_name": run.folder.name,
            "time": self.minutes,
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks_per_node,
            "cpus_per_task": self.cpus_per_task,
            "additional_parameters": extra | {"requeue": True, "signal": f"TERM@{NOTICE_S}"},
            "srun_args": ["--kill-on-bad-exit=1"],  # one process cannot go on without the others
            "stderr_to_stdout": True,
            "setup": [*exports, *self.setup],
            "teardown": list(REQUEUE),
        }

    def command(self, run: Run) -> list[str]:
        """What each process of the job executes."""
        words = train_command(run)
        words += ["--mesh", self.mesh] if self.mesh else []
        return words + (["--distributed", "auto"] if self.processes > 1 else [])


def launch(
    runs: Sequence[Run],
    launcher: Launcher = "local",
    *,
    workers: int | None = None,
    slurm: SlurmOptions | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Starts what is not finished, and waits for it unless told otherwise; one outcome per run.

    Args:
      workers: of `local`, see `runner.run_all`.
      slurm: of `slurm`, by default `SlurmOptions()`.

    Raises:
      ConfigError: for an option of another launcher, or where Slurm or submitit is missing or refuses the jobs.
      ValueError: see `runner.run_all`.
    """
    console = console or Console()
    if workers is not None and launcher != "local":
        raise ConfigError("workers", workers, f"belongs to the launcher local, not to {launcher}: leave it out")
    if slurm not in (None, SlurmOptions()) and launcher != "slurm":
        raise ConfigError("launcher", launcher, "the options under slurm are for the launcher slurm: choose that one")
    if launcher == "local":
        return run_all(runs, workers, console=console)
    jobs = jobs_by_folder(runs)
    if launcher == "print":
        _print(list(jobs.values()), console)
    else:
        _Slurm(list(jobs.values()), slurm or SlurmOptions()).loop(console)
    return [Outcome(run, jobs[run.folder].state, jobs[run.folder].tail) for run in runs]


def _print(jobs: list[Job], console: Console) -> None:
    """One line of shell per run that is missing, for any shell on a machine that shares this disk."""
    done = sum(job.state == "finished" for job in jobs)
    console.print(Text(f"# {len(jobs)} runs, {done} finished before"), soft_wrap=True)
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in whereabouts().items())
    for job in jobs:
        if job.state == "finished":
            continue
        if job.is_held:
            console.print(Text(f"# running elsewhere: {job.run.name}"), soft_wrap=True)
            continue
        write_atomically(job.run.folder / "config.json", to_json(job.run.config))
        line = f"cd {shlex.quote(os.getcwd())} && {exports} {shlex.join(train_command(job.run))}"
        console.print(Text(line), soft_wrap=True)


# ---- Slurm ------------------------------------------------------------------------------------------------------


class _Slurm:
    """One job per run. Which jobs are a run's is known from the scripts that submitit leaves in its folder `slurm/`, so
    that a sweep finds those of an earlier one again."""

    def __init__(self, jobs: list[Job], options: SlurmOptions):
        self.jobs, self.options = jobs, options
        self.gone: set[str] = set()  # names of runs that had left the queue, without a result, when it was last read

    def loop(self, console: Console) -> None:
        """Submits what is missing; with `wait` until every run is finished or failed."""
        _queue()  # where there is no Slurm, this says so before anything else is said
        with View(console, self.jobs, "a Slurm job each") as view:
            queue = self.submit(view)
            if not self.options.wait:
                view.say(f"{len(queue)} jobs in the queue; the same command reports what is finished by then")
                return
            try:
                while any(job.state in ("waiting", "running", "elsewhere") for job in self.jobs):
                    self.advance(view)
                    view.refresh()
                    time.sleep(POLL_S)
            except KeyboardInterrupt:
                view.say(f"no longer watched, still in the queue: {' '.join(sorted(self.ours()))} (scancel ends them)")
                raise

    def submit(self, view: View) -> set[str]:
        """A job for every run that has none; the jobs of all of them."""
        waiting = [job for job in self.jobs if job.state == "waiting"]
        queue = _queue() if waiting else {}
        for job in waiting:
            if job.is_held or self.ids(job) & set(queue):
                view.say(f"there already: {job.run.name}")
                continue
            write_atomically(job.run.folder / "config.json", to_json(job.run.config))
            view.say(f"job {_submit(job.run, self.options)}: {job.run.name}")
        return self.ours() if waiting else set()

    def advance(self, view: View) -> None:
        """Moves every run on to what Slurm and its folder say of it."""
        try:
            queue = _queue()
        except ConfigError as error:  # a controller that restarts; the jobs do not mind
            view.say(f"Slurm does not answer, asking again: {error.remedy}")
            return
        gone = set()
        for job in self.jobs:
            if job.state in ("finished", "failed"):
                continue
            before, states = job.state, {queue[i] for i in self.ids(job) & set(queue)}
            if job.has_result:
                job.state = "finished"
            elif states:
                job.state = "waiting" if states == {"PENDING"} else "running"
            elif job.is_held:
                job.state = "elsewhere"
            elif job.run.name in self.gone:  # twice: a result may reach this machine's view of the disk later
                job.state, job.tail, job.log = "failed", _tail(job.run), "slurm"
            else:
                gone.add(job.run.name)
            if job.state != before:
                view.event(job)
        self.gone = gone

    def ids(self, job: Job) -> set[str]:
        """The Slurm jobs that were ever submitted for this run from its folder."""
        return {path.name.split("_")[0] for path in (job.run.folder / "slurm").glob("*_submission.sh")}

    def ours(self) -> set[str]:
        """Those of all runs that have not ended."""
        queue = _queue()
        return {i for job in self.jobs for i in self.ids(job) if i in queue}


def _queue() -> dict[str, str]:
    """Number -> state of this user's jobs that have not ended."""
    if not shutil.which("sbatch") or not shutil.which("squeue"):
        raise ConfigError(
            "launcher", "slurm", "there is no Slurm here (no sbatch, no squeue): start it on a login node"
        )
    words = ["squeue", "--me", "--noheader", "--format", "%A %T"]
    answer = subprocess.run(words, capture_output=True, text=True)
    if answer.returncode:
        raise ConfigError("launcher", "slurm", f"squeue: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    return dict(line.split() for line in answer.stdout.splitlines())


def _submit(run: Run, options: SlurmOptions) -> str:
    """The number of a new job. Its processes become the trainer, so that signals and exit codes are the trainer's."""
    try:
        import submitit
    except ImportError:
        raise ConfigError("launcher", "slurm", "submitit is not installed: pip install -e '.[slurm]'") from None
    executor = submitit.SlurmExecutor(folder=run.folder.resolve() / "slurm")
    executor.update_parameters(**options.parameters(run))
    words = options.command(run)
    try:
        return executor.submit(os.execv, words[0], words).job_id
    except submitit.core.utils.FailedJobError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError("launcher", "slurm", f"sbatch refuses the job of {run.name}: {reason}") from error


def _tail(run: Run) -> str:
    logs = sorted((run.folder / "slurm").glob("*_log.out"), key=lambda path: path.stat().st_mtime)
    return "\n".join(last_lines(logs[-1], 15)) if logs else "no log: the job ended before it began"
