"""The command line: `python -m gattn train --help`."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gattn.config import Config, ConfigError, from_dict, is_import_path


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. What a user can get wrong is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {"train": train_command}
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


def train_command(argv: list[str]) -> int:
    """Trains one run, or shows it (`--dry-run`)."""
    from configs.models import PRESETS
    from configs.variants import VARIANTS, apply

    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--preset", default="tiny")
    chooser.add_argument("--config")
    chooser.add_argument("--gate")
    chosen, rest = chooser.parse_known_args(argv)
    config = _read_config(Path(chosen.config)) if chosen.config else find_preset(chosen.preset, PRESETS)
    if chosen.gate:
        config = apply(config, chosen.gate)

    @dataclass(frozen=True)
    class Train:
        """Trains a decoder; the same command goes on where an interrupted run stopped."""

        config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
        preset: Annotated[str, tyro.conf.arg(help=f"{', '.join(PRESETS)}, or package.module:function")] = chosen.preset
        config_file: Annotated[str, tyro.conf.arg(name="config", help="A config.json, instead of a preset")] = ""
        gate: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(VARIANTS)}; several joined by +")] = "baseline"
        dir: Annotated[str, tyro.conf.arg(help="The run's folder instead of $GATTN_HOME/runs/<name>")] = ""
        dry_run: Annotated[bool, tyro.conf.arg(help="Show shapes, parameters, FLOPs and memory; train nothing")] = False

    given = tyro.cli(Train, default=Train(config), args=rest, prog="python -m gattn train")
    return dry_run(given.config) if given.dry_run else _train(given.config, Path(given.dir) if given.dir else None)


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

    from gattn import files, model, train

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{config.run_name} -> {files.run_directory(config)}\n")
    for name, shape in model.param_shapes(config.model).items():
        console.print(f"  {name:40} {shape}")
    counts, memory = train.describe_model(config), train.memory_estimate(config)
    console.print(f"\nparameters            {counts['params']:,}")
    console.print(f"  without embeddings  {counts['non_embedding_params']:,}")
    console.print(f"  of gates            {counts['gate_params']:,}")
    console.print(f"  more than plain     {counts['param_difference']:+,} (FFN {counts['ffn_width']})")
    console.print(f"training FLOPs/token  {counts['flops_per_token']:,.0f}")
    batch = config.data.batch_size * config.data.seq_len
    console.print(f"tokens                {batch:,} a step, {batch * config.train.steps:,} in all")
    console.print(f"memory, one device    {memory['states'] / 2**30:.2f} GiB parameters, gradients and AdamW moments")
    console.print(f"                      {memory['activations'] / 2**30:.2f} GiB kept for backward (upper estimate)")
    return 0


def _read_config(path: Path) -> Config:
    try:
        return from_dict(Config, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError("config", str(path), f"not a readable JSON file: {error}") from error


def _train(config: Config, directory: Path | None) -> int:
    from gattn import train

    try:
        result = train.train(config, directory)
    except train.TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    measured = result["eval"]
    line = f"held-out loss {measured['initial_loss']:.4f} -> {measured['loss']:.4f}"
    line += f", perplexity {measured['perplexity']:.2f}"
    if measured["bits_per_byte"] is not None:
        line += f", {measured['bits_per_byte']:.4f} bits per byte"
    print(line)
    print(f"F-Attn {result['probes']['f_attn']:.4f} (uniform attention gives {result['probes']['f_attn_floor']:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
