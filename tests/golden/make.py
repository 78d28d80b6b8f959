"""Small random models of every imported family, and what PyTorch makes of them. Needs an environment of its own:

    python3.11 -m venv .venv-torch && .venv-torch/bin/pip install torch==2.13.0 "transformers>=5.24" safetensors
    .venv-torch/bin/python tests/golden/make.py make            # writes tests/golden/<family>/ (committed)
    .venv/bin/python -m tests.golden.export /tmp/exported       # what gattn makes of each, in the layouts it writes
    .venv-torch/bin/python tests/golden/make.py check /tmp/exported > tests/golden/loaded.txt

`golden.npz` of a family: `tokens` [2, 48], `logits` [2, 48, V] in float32, and `greedy`, the 32 tokens that greedy
decoding adds to the first row. Of the official gated layout there is no released code; its attention is written here
from its description (a sigmoid of what q_proj holds beside the query, group by group) around the stock one.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
SMALL = {
    **{"vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6},
    **{"tie_word_embeddings": False, "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None},
}
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "qwen3": ("qwen3", {}),
    "qwen3_tied_yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_unnormed": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "official_elementwise": ("qwen3", {"elementwise_attn_output_gate": True, "headwise_attn_output_gate": False}),
    "official_headwise": ("qwen3", {"headwise_attn_output_gate": True, "elementwise_attn_output_gate": False}),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
}


class GatedQuery(torch.nn.Module):
    """The official q_proj: gives the query, keeps the gate for `Gated`."""

    def __init__(self, config, headwise):
        super().__init__()
        self.kv, self.heads, self.dim = config.num_key_value_heads, config.num_attention_heads, config.head_dim
        self.headwise, self.gate = headwise, None
        out = self.heads * self.dim + self.heads * (1 if headwise else self.dim)
        self.weight = torch.nn.Parameter(torch.randn(out, config.hidden_size) * config.initializer_range)

    def forward(self, x):
        group, size = self.heads // self.kv, self.heads // self.kv * self.dim
        parts = (x @ self.weight.T).unflatten(-1, (self.kv, -1))
        query, gate = parts[..., :size], parts[..., size:]
        gate = gate.unflatten(-1, (group, -1)).flatten(-3, -2)  # [..., heads, dim or 1]
        self.gate = gate.expand(*gate.shape[:-1], self.dim).flatten(-2)
        return query.flatten(-2)


def gated(model, config, headwise):
    """The stock model with the official gate."""
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj = GatedQuery(config, headwise)
        attention.o_proj.register_forward_pre_hook(
            lambda module, args, attention=attention: (args[0] * torch.sigmoid(attention.q_proj.gate),)
        )
    return model


def build(kind, changes):
    """A model with random weights; norms too, lest a forgotten one goes unseen."""
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float()
    if changes.get("elementwise_attn_output_gate") or changes.get("headwise_attn_output_gate"):
        gated(model, config, changes["headwise_attn_output_gate"])
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.0 if kind.startswith("qwen3_5") else 1.0, 0.2)
    return model.eval()


def run(model, tokens):
    """Logits, and 32 greedy tokens after the first row, each from the whole text so far."""
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
        text = tokens[:1]
        for _ in range(32):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return logits.float().numpy(), text[0, tokens.shape[1] :].numpy()


def make():
    """Writes every family's folder anew."""
    for number, (name, (kind, changes)) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        model = build(kind, changes)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        for extra in folder.glob("generation_config.json"):
            extra.unlink()
        if name == "official_headwise":  # as the official files are
            torch.save(dict(model.state_dict()), folder / "pytorch_model.bin")
            (folder / "model.safetensors").unlink()
        tokens = torch.randint(0, SMALL["vocab_size"], (2, 48))
        logits, greedy = run(model, tokens)
        np.savez_compressed(folder / "golden.npz", tokens=tokens.numpy(), logits=logits, greedy=greedy)
        print(name, sorted(path.name for path in folder.iterdir()), f"largest logit {abs(logits).max():.2f}")


def check(root):
    """Loads what gattn exported with stock transformers (the official layout with the attention above)."""
    print(f"transformers {__import__('transformers').__version__}, torch {torch.__version__}")
    worst = 0.0
    for folder in sorted(pathlib.Path(root).iterdir()):
        family = folder.name.split("-to-")[0]
        golden = np.load(HERE / family / "golden.npz")
        config = json.loads((folder / "config.json").read_text())
        gate = [key for key in ("elementwise", "headwise") if config.get(f"{key}_attn_output_gate")]
        if gate:
            from safetensors.torch import load_file

            model = gated(AutoModelForCausalLM.from_config(read(folder)), read(folder), gate == ["headwise"])
            model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
            )
            assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        logits, greedy = run(model.eval(), torch.tensor(golden["tokens"]))
        difference = float(abs(logits - golden["logits"]).max())
        worst = max(worst, difference)
        same = "the same" if (greedy == golden["greedy"]).all() else "OTHER"
        print(
            f"{folder.name:40} {type(model).__name__:24} largest difference {difference:.1e}, {same} 32 greedy tokens"
        )
        assert same == "the same"
    assert worst <= 2e-5, worst
    print(f"all within 2e-5: {worst:.1e} at most")


def read(folder):
    """The config of a folder, for eager attention."""
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    return config


if __name__ == "__main__":
    make() if sys.argv[1] == "make" else check(sys.argv[2])
