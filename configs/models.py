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
        data=DataConfig(seq_len=4096, batch_size=1024, eval_sequences=1024),
        optim=OptimConfig(learning_rate=4e-3, final_learning_rate=3e-5, warmup_steps=1000),
        train=TrainConfig(steps=100_000, eval_every=1000, checkpoint_every=1000),
    )


def moe_tiny() -> Config:
    """About 0.75M active of 2.5M non-embedding parameters in 16 experts, top-4, for a CPU.

    `python -m gattn train --preset moe_tiny`: the training loss falls from 8.3 to 6.2 in the first 50 steps.
    """
    return Config(
        model=ModelConfig(
            vocab_size=4096,
            num_layers=3,
            d_model=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            match_params=False,
            scan_layers=False,  # as in `tiny`
            num_experts=16,
            experts_per_token=4,
            expert_dim=128,
        ),
        data=DataConfig(seq_len=256, batch_size=8, eval_sequences=128),
        optim=OptimConfig(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=20),
        train=TrainConfig(
            steps=300,
            loss_chunk=256,
            eval_every=100,
            checkpoint_every=100,
            balance_loss=0.01,
            router_z_loss=1e-3,
        ),
    )


def moe_small() -> Config:
    """About 136M active of 0.93B non-embedding parameters in 64 experts, top-8, for one GPU or TPU with 80 GB; 5.2B
    tokens. Not trained yet: no number to expect.

    `python -m gattn train --preset moe_small`
    """
    return Config(
        model=ModelConfig(
            vocab_size=32_768,
            num_layers=16,
            d_model=768,
            num_heads=12,
            num_kv_heads=2,
            head_dim=64,
            match_params=False,
            dtype="bfloat16",
            remat="full",
            num_experts=64,
            experts_per_token=8,
            expert_dim=384,
        ),
        data=DataConfig(seq_len=2048, batch_size=128, eval_sequences=128),
        optim=OptimConfig(learning_rate=1.5e-3, final_learning_rate=1.5e-4, warmup_steps=1000),
        train=TrainConfig(
            steps=20_000,
            eval_every=1000,
            checkpoint_every=1000,
            accumulation=8,
            balance_loss=0.01,
            router_z_loss=1e-3,
        ),
    )


def moe_15a2b() -> Config:
    """The paper's mixture-of-experts model (Tables 1, 3, 4, 6: 400B tokens, batch 1024, LR 2e-3 to 3e-5).

    `python -m gattn train --preset moe_15a2b --dry-run`. The vocabulary is that of the official dense checkpoints; the
    weights of balance and z-loss are not published: 0.01 and 1e-3 are the usual ones (Switch Transformer, ST-MoE).
    `python -m experiments.parameters` compares its parameters with the published ones.
    """
    return Config(
        model=ModelConfig(
            vocab_size=152_064,
            num_layers=24,
            d_model=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            match_params=False,
            tied_embeddings=False,
            qk_norm=True,
            dtype="bfloat16",
            remat="full",
            num_experts=128,
            experts_per_token=8,
            expert_dim=768,
        ),
        data=DataConfig(seq_len=4096, batch_size=1024, eval_sequences=1024),
        optim=OptimConfig(learning_rate=2e-3, final_learning_rate=3e-5, warmup_steps=1000),
        train=TrainConfig(steps=100_000, eval_every=1000, checkpoint_every=1000, balance_loss=0.01, router_z_loss=1e-3),
    )


PRESETS = {
    preset.__name__: preset
    for preset in (tiny, small, base, dense_1p7b_28l, dense_1p7b_48l, moe_tiny, moe_small, moe_15a2b)
}
