"""Model presets: `python -m gattn train --preset NAME`. Each docstring gives the command and what to expect."""

from gattn.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def tiny() -> Config:
    """About 1M non-embedding parameters, for a CPU.

    `python -m gattn train --preset tiny`: held-out perplexity 105 after 614,400 tokens, 1.90 bits per byte, in 3 to 4
    minutes of one core; with `--gate g1_headwise` 91 and 1.84 (means of 3 seeds, experiments/reports/table4-cpu).
    """
    return Config(
        model=ModelConfig(
            vocab_size=4096,
            num_layers=4,
            d_model=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            ffn_dim=512,
            scan_layers=False,  # four layers compile quickly, and a CPU pays a fifth of a step for stacked activations
        ),
        data=DataConfig(seq_len=256, batch_size=8, eval_sequences=128),
        optim=OptimConfig(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=50),
        train=TrainConfig(steps=300, loss_chunk=256, eval_every=100, checkpoint_every=100),
    )


def small() -> Config:
    """About 25M non-embedding parameters, for one GPU or TPU; 655M tokens. Not trained yet: no number to expect.

    `python -m gattn train --preset small --model.dtype bfloat16`
    """
    return Config(
        model=ModelConfig(
            vocab_size=16_384, num_layers=8, d_model=512, num_heads=8, num_kv_heads=4, head_dim=64, ffn_dim=1536
        ),
        data=DataConfig(seq_len=1024, batch_size=64),
        optim=OptimConfig(learning_rate=2e-3, final_learning_rate=2e-4, warmup_steps=500),
        train=TrainConfig(steps=10_000, eval_every=500, checkpoint_every=500),
    )


def base() -> Config:
    """About 125M non-embedding parameters, for one GPU or TPU; 5.2B tokens. Not trained yet: no number to expect.

    `python -m gattn train --preset base`
    """
    return Config(
        model=ModelConfig(
            vocab_size=32_768,
            num_layers=16,
            d_model=768,
            num_heads=12,
            num_kv_heads=6,
            head_dim=64,
            ffn_dim=2688,
            ffn_multiple=64,
            dtype="bfloat16",
            remat="dots",
        ),
        data=DataConfig(seq_len=2048, batch_size=128, eval_sequences=32),
        optim=OptimConfig(learning_rate=1.5e-3, final_learning_rate=1.5e-4, warmup_steps=1000),
        train=TrainConfig(steps=20_000, eval_every=1000, checkpoint_every=1000),
    )


def dense_1p7b_28l() -> Config:
    """The paper's 28-layer dense model (Table 2, rows 1-2: 400B tokens, batch 1024, LR 4e-3).

    Look at it anywhere: `python -m gattn train --preset dense_1p7b_28l --dry-run`. The vocabulary is that of the
    official checkpoints; warm-up and final LR of the dense runs are not published: the MoE runs' stand here.
    """
    return _dense(num_layers=28, d_model=2048, ffn_dim=6144)


def dense_1p7b_48l() -> Config:
    """The paper's 48-layer dense model (Table 2, rows 5-10), narrower and deeper at the same size.

    `python -m gattn train --preset dense_1p7b_48l --dry-run`
    """
    return _dense(num_layers=48, d_model=1536, ffn_dim=4608)


def _dense(num_layers: int, d_model: int, ffn_dim: int) -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=152_064,
            num_layers=num_layers,
            d_model=d_model,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            ffn_dim=ffn_dim,
            ffn_multiple=128,
            dtype="bfloat16",
            remat="full",
        ),
        data=DataConfig(seq_len=4096, batch_size=1024, eval_sequences=32),
        optim=OptimConfig(learning_rate=4e-3, final_learning_rate=3e-5, warmup_steps=1000),
        train=TrainConfig(steps=100_000, eval_every=1000, checkpoint_every=1000),
    )


PRESETS = {preset.__name__: preset for preset in (tiny, small, base, dense_1p7b_28l, dense_1p7b_48l)}
