"""The command line: `python -m gattn train --help`."""

import argparse
import dataclasses
import glob
import importlib
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gattn.config import Config, ConfigError, MeshConfig, from_dict, is_import_path
from gattn.files import as_path, cache, home, run_directory
from gattn.guard import TrainingError

RunArgument = Annotated[
    tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help="Its folder, or its name below runs/")
]
StepArgument = Annotated[int | None, tyro.conf.arg(help="The checkpoint's step instead of the newest")]


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. What a user can get wrong is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {
        **{"train": train_command, "probe": probe_command, "generate": generate_command, "eval": eval_command},
        **{"prepare": prepare_command, "compile": compile_command, "convert": convert_command},
    }
    if not argv or argv[0] not in commands:
        print(
            f"usage: python -m gattn {{{','.join(commands)}}} ... (--help after a command explains it)", file=sys.stderr
        )
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    try:
        return commands[argv[0]](argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        if not any(name in str(error) for name in ("gcsfs", "google")):
            raise
        print(f"error: {error}: a bucket needs pip install -e '.[gcs]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before or beside what the command itself answers with a checkpoint
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def train_command(argv: list[str]) -> int:
    """Trains one run, or shows it (`--dry-run`)."""
    from configs.models import PRESETS
    from configs.variants import NAMES

    config, named, rest = choose(argv)

    @dataclass(frozen=True)
    class Train:
        """Trains a decoder; the same command goes on where an interrupted run stopped."""

        config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
        preset: Annotated[str, tyro.conf.arg(help=f"{', '.join(PRESETS)}, or package.module:function")] = named
        config_file: Annotated[str, tyro.conf.arg(name="config", help="A config.json, instead of a preset")] = ""
        gate: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(NAMES)}; several joined by +")] = "baseline"
        mesh: Annotated[str, tyro.conf.arg(help="All axes of the mesh at once: data=2,fsdp=4")] = ""
        distributed: Annotated[str, tyro.conf.arg(help="Of several processes, auto or HOST:PORT,COUNT,INDEX")] = ""
        dir: Annotated[str, tyro.conf.arg(help="The run's folder instead of $GATTN_HOME/runs/<name>")] = ""
        profile: Annotated[str, tyro.conf.arg(help="Trace steps A to B-1 with JAX's profiler, A:B")] = ""
        dry_run: Annotated[bool, tyro.conf.arg(help="Show shapes, parameters, FLOPs and memory; train nothing")] = False

    given = tyro.cli(Train, default=Train(config), args=rest, prog="python -m gattn train")
    profile = _steps(given.profile)
    if given.dry_run:
        return dry_run(given.config)
    return _train(given.config, as_path(given.dir) if given.dir else None, profile, given.distributed)


def probe_command(argv: list[str]) -> int:
    """Measures a run with every probe and writes the page."""

    @dataclass(frozen=True)
    class Probe:
        """Looks inside a run: attention sinks, activations, gates; prints tables, writes probe.html and probe.json."""

        run: RunArgument
        text: Annotated[
            str, tyro.conf.arg(metavar="FILE", help="UTF-8 text to measure on instead of the held-out data")
        ] = ""
        layers: Annotated[tuple[int, ...], tyro.conf.arg(help="Layers, from 0, whose attention maps are shown")] = ()
        step: StepArgument = None

    given = tyro.cli(Probe, args=argv, prog="python -m gattn probe")
    from gattn import inspection, resume

    run, text = resume.find_run(given.run), as_path(given.text) if given.text else None
    page = inspection.inspect(run, text=text, layers=given.layers or None, step=given.step)
    print(f"\n{page}")
    return 0


def generate_command(argv: list[str]) -> int:
    """Continues prompts with a run's model."""
    from gattn.generate import Sampling

    @dataclass(frozen=True)
    class Generate:
        """Continues prompts; a single one is shown as it grows."""

        run: RunArgument
        sampling: Annotated[Sampling, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Sampling)
        prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help="May be given often")] = ()
        mesh: Annotated[str, tyro.conf.arg(help="Over several devices: tensor=4; by default all of them, data")] = ""
        step: StepArgument = None

    given = tyro.cli(Generate, args=argv, prog="python -m gattn generate")
    if not given.prompt:
        raise ConfigError("prompt", "", "nothing to go on from: --prompt TEXT")
    from gattn import generate, resume

    loaded = resume.load(resume.find_run(given.run), given.step, lambda line: print(line, file=sys.stderr))
    generate.interactive(loaded, given.prompt, given.sampling, MeshConfig.parse(given.mesh))
    return 0


def eval_command(argv: list[str]) -> int:
    """Measures a run's perplexity and its RULER scores."""
    from gattn.evaluate import Evaluation

    @dataclass(frozen=True)
    class Eval:
        """Perplexity at any length and by position, and RULER; prints a table and writes it into result.json."""

        run: RunArgument
        how: Annotated[Evaluation, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Evaluation)
        step: StepArgument = None

    given = tyro.cli(Eval, args=argv, prog="python -m gattn eval")
    from rich.console import Console

    from gattn import evaluate, resume

    run = resume.find_run(given.run)
    evaluate.writable(run)
    loaded = resume.load(run, given.step, lambda line: print(line, file=sys.stderr))
    entries = evaluate.evaluate(loaded, given.how, lambda line: print(line, file=sys.stderr))
    evaluate.show(entries, Console())
    print(f"\n{evaluate.record(run, entries)}")
    return 0


def prepare_command(argv: list[str]) -> int:
    """Tokenises users' files for training."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1

    @dataclass(frozen=True)
    class Prepare:
        """Tokenises files for training; the same command goes on where an interrupted one stopped."""

        files: Annotated[
            tyro.conf.Positional[tuple[str, ...]],
            tyro.conf.arg(help="Text, JSONL, Parquet or ArrayRecord: paths, folders, globs"),
        ]
        tokenizer: Annotated[str, tyro.conf.arg(help="bpe (trained on the files), bytes, or a tokenizer.json")] = "bpe"
        vocab_size: Annotated[int, tyro.conf.arg(help="Entries that bpe is trained to")] = 4096
        bos: Annotated[str, tyro.conf.arg(help="The tokenizer.json's special token that separates documents")] = ""
        field: Annotated[str, tyro.conf.arg(help="Where JSON objects and Parquet tables keep the text")] = "text"
        held_out: Annotated[float, tyro.conf.arg(help="Share of the documents kept from training")] = 0.05
        workers: Annotated[int, tyro.conf.arg(help="Processes at work")] = cores
        out: Annotated[str, tyro.conf.arg(help="A new folder, instead of $GATTN_HOME/data/<name of the first>")] = ""

    given = tyro.cli(Prepare, args=argv, prog="python -m gattn prepare")
    if not given.files:
        raise ConfigError("files", (), "name the files to prepare: paths, folders, globs")
    out = as_path(given.out) if given.out else home() / "data" / _data_name(given.files[0])
    options = {k: v for k, v in vars(given).items() if k not in ("files", "out", "bos")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        from rich.console import Console

        from gattn.data.prepare import prepare

        prepare(given.files, out, bos=given.bos or None, console=Console(soft_wrap=True, highlight=False), **options)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on where it stopped", file=sys.stderr)
        return 130
    index = json.loads((out / "index.json").read_bytes())
    tokens, documents = index["tokens"], sum(index["documents"].values())
    total = sum(tokens.values())
    print(f"{out}: {total:,} tokens ({tokens['held_out']:,} held out) below {index['vocab_size']:,}")
    print(f"  {documents:,} documents, {index['bytes'] / (total - documents):.2f} bytes per token")
    if index["empty_documents"]:
        print(f"  {index['empty_documents']:,} empty documents were left out")
    print(f"python -m gattn train --data.source {shlex.quote(os.fspath(out))}{_fitting(index)}")
    return 0


def convert_command(argv: list[str]) -> int:
    """Writes a model as a checkpoint in a layout of Hugging Face."""

    @dataclass(frozen=True)
    class Convert:
        """Writes a run, or a checkpoint of Hugging Face, as a checkpoint of Hugging Face: safetensors and config.json.

        Such a folder, or hf://owner/name, can also be given as it is where a run is expected: probe, generate, eval.
        """

        src: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC", help="A run, a folder, hf://owner/name")]
        dst: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DST", help="A folder that is not there yet")]
        layout: Annotated[
            Literal["auto", "plain", "official", "qwen3_5"],
            tyro.conf.arg(
                help="plain: Qwen3, Llama or Mistral, without a gate; official: the paper's, gate inside q_proj; "
                "qwen3_5: Qwen3_5ForCausalLM of transformers, with a gate; auto: plain or official"
            ),
        ] = "auto"
        step: StepArgument = None

    given = tyro.cli(Convert, args=argv, prog="python -m gattn convert")
    from gattn import resume
    from gattn.interop import hf

    out, run = Path(given.dst).expanduser(), resume.find_run(given.src)
    if hf.is_checkpoint(run):
        (model, params), beside = hf.load(run), hf.companions(run)
    else:
        loaded = resume.load(run, given.step)
        model, params, words = loaded.config.model, loaded.params, loaded.source.tokenizer_json
        beside = {"tokenizer.json": words.encode()} if words else {}
    layout = hf.layout_of(model) if given.layout == "auto" else given.layout
    hf.save(out, model, params, layout, beside)
    print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return 0


def compile_command(argv: list[str]) -> int:
    """Compiles a train step for machines that are not there, and says what it needs and takes."""
    from gattn import compile_report

    config, _, rest = choose(argv)
    return compile_report.command(config, rest)


def choose(argv: list[str]) -> tuple[Config, str, list[str]]:
    """The config that --preset or --config, --gate and --mesh make, the preset's name, and the other arguments."""
    from configs.models import PRESETS
    from configs.variants import apply

    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--preset", default="tiny")
    chooser.add_argument("--config")
    chooser.add_argument("--gate")
    chooser.add_argument("--mesh", default="")
    chosen, rest = chooser.parse_known_args(argv)
    config = _read_config(Path(chosen.config)) if chosen.config else find_preset(chosen.preset, PRESETS)
    if chosen.gate:
        config = apply(config, chosen.gate)
    if chosen.mesh:
        config = dataclasses.replace(config, mesh=MeshConfig.parse(chosen.mesh))
    return config, chosen.preset, rest


def _fitting(index: dict[str, Any]) -> str:
    """What the default preset needs on top to be trained on these data."""
    from configs.models import tiny

    config, windows = tiny(), index["tokens"]["held_out"] // tiny().data.seq_len
    wider = f" --model.vocab-size {index['vocab_size']}" if index["vocab_size"] > config.model.vocab_size else ""
    fewer = f" --data.eval-sequences {windows}" if 0 < windows < config.data.eval_sequences else ""
    return wider + fewer


def _data_name(first: str) -> str:
    """Names the folder after the first input: a file without its ending, a folder, or what holds a pattern."""
    parts = [part for part in as_path(first).absolute().parts if not glob.has_magic(part)]
    return (parts[-1] if as_path(first).is_dir() else Path(parts[-1]).stem) or "data"


def find_preset(name: str, presets: dict[str, Callable[[], Config]]) -> Config:
    """The preset of that name, or what the function at `package.module:function` returns."""
    if name in presets:
        return presets[name]()
    if not is_import_path(name):
        raise ConfigError("preset", name, f"no such preset; known: {', '.join(presets)}, or package.module:function")
    module, _, function = name.partition(":")
    try:
        preset = getattr(importlib.import_module(module), function)
        config = preset()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError("preset", name, f"cannot be imported and called: {error}") from error
    if not isinstance(config, Config):
        raise ConfigError("preset", name, f"returns {type(config).__name__}, not a gattn.config.Config")
    return config


def dry_run(config: Config) -> int:
    """Prints what a run would be, without allocating it."""
    from rich.console import Console

    from gattn import files, model, step
    from gattn.data.loader import open_source

    on_mesh = on_each_device(config) if config.mesh != MeshConfig() else None
    if config.data.source != "corpus":  # which is always there, and takes seconds
        open_source(config)

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{config.run_name} -> {files.run_directory(config)}\n")
    for name, shape in model.param_shapes(config.model).items():
        console.print(f"  {name:40} {shape}")
    counts, memory = step.describe_model(config), step.memory_estimate(config)
    console.print(f"\nparameters            {counts['params']:,}")
    console.print(f"  without embeddings  {counts['non_embedding_params']:,}")
    console.print(f"  of gates            {counts['gate_params']:,}")
    console.print(f"  more than plain     {counts['param_difference']:+,} (FFN {counts['ffn_width']})")
    console.print(f"training FLOPs/token  {counts['flops_per_token']:,.0f}")
    batch = config.data.batch_size * config.data.seq_len
    console.print(f"tokens                {batch:,} a step, {batch * config.train.steps:,} in all")
    console.print(f"memory, one device    {memory['states'] / 2**30:.2f} GiB parameters, gradients and AdamW moments")
    console.print(f"                      {memory['activations'] / 2**30:.2f} GiB kept for backward (upper estimate)")
    if on_mesh:
        size, devices = on_mesh
        console.print(f"mesh                  {config.mesh}: {devices} devices")
        console.print(f"memory, each of them  {size / 2**30:.2f} GiB parameters and AdamW moments")
    return 0


def on_each_device(config: Config) -> tuple[int, int]:
    """Bytes of the training state that one device of `config.mesh` holds, and the number of devices, which need not be
    there; `data` is 1 where it is open.

    Raises:
      ConfigError: the mesh does not divide something.
    """
    import jax

    from gattn import sharding, step

    named = [getattr(config.mesh, axis) or 1 for axis in sharding.AXES]
    shape = sharding.mesh_shape(config.mesh, math.prod(named))
    sharding.check(config, shape)
    mesh: Any = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))  # no devices
    state = step.abstract_state(config)
    pieces = jax.tree.map(lambda leaf, where: where.shard_shape(leaf.shape), state, sharding.shardings(mesh, state))
    sizes = jax.tree.map(lambda leaf, piece: math.prod(piece) * leaf.dtype.itemsize, state, pieces)
    return sum(jax.tree.leaves(sizes)), mesh.size


def _read_config(path: Path) -> Config:
    try:
        return from_dict(Config, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError("config", str(path), f"not a readable JSON file: {error}") from error


def _steps(text: str) -> tuple[int, int] | None:
    """Two steps from `A:B`, None from nothing."""
    if not text:
        return None
    start, _, stop = text.partition(":")
    if not (start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise ConfigError("profile", text, "give two steps, the first and the one after the last: 10:15")
    return int(start), int(stop)


def _train(config: Config, directory: Path | None, profile: tuple[int, int] | None, processes: str) -> int:
    import jax

    from gattn import distributed, train

    distributed.initialize(processes)
    if not jax.config.jax_compilation_cache_dir:  # a run that goes on need not compile again
        jax.config.update("jax_compilation_cache_dir", str((cache() / "jax").absolute()))
    result = train.train(config, directory, profile=profile)
    if not distributed.is_first():
        return 0
    if "diverged" in result:
        print(f"diverged: {result['diverged']['reason']}")
        return 0
    measured = result["eval"]
    line = f"held-out loss {measured['initial_loss']:.4f} -> {measured['loss']:.4f}"
    line += f", perplexity {measured['perplexity']:.2f}"
    if measured["bits_per_byte"] is not None:
        line += f", {measured['bits_per_byte']:.4f} bits per byte"
    print(line)
    for name, one in measured["sets"].items() if len(measured["sets"]) > 1 else ():
        print(f"  {name}: loss {one['loss']:.4f}, perplexity {one['perplexity']:.2f}")
    print(f"F-Attn {result['probes']['f_attn']:.4f} (uniform attention gives {result['probes']['f_attn_floor']:.4f})")
    spikes, speed = result["spikes"]["count"], result["time"]
    print(f"{spikes} loss spikes; {speed['train_s']:,.0f} s at {speed['tokens_per_s']:,.0f} tokens a second")
    print(f"python -m gattn probe {shlex.quote(os.fspath(directory or run_directory(config)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
