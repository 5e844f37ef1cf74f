"""Converts a checkpoint whose shards are made when they are asked for and deleted when they are released.

Run as a program it prints the peak memory of the process, before and after: a checkpoint larger than the disk is
converted the same way as one that fits.
"""

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.convert.convert import convert
from engine.models.config import parse_config
from engine.models.layout import tensor_shapes

PER_SHARD = 24 << 20


def text_config(arguments):
    config = {
        "model_type": "qwen3_5_moe" if arguments.experts else "qwen3_5",
        "vocab_size": arguments.vocab,
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 128,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": arguments.hidden // 128,
        "linear_num_value_heads": arguments.hidden // 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-6,
    }
    moe = {
        "num_experts": arguments.experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": arguments.width,
        "shared_expert_intermediate_size": arguments.width,
    }
    return config | (moe if arguments.experts else {"intermediate_size": arguments.width})


class GeneratedShards:
    """Random weights, the same for a shard whenever it is made. Counts what lies on disk at once."""

    def __init__(self, directory, shapes, per_shard):
        self.directory, self.shapes = directory, shapes
        self.members = {}
        size = 0
        for name, shape in shapes.items():
            if not self.members or size >= per_shard:
                self.members[f"model-{len(self.members):05d}.safetensors"] = []
                size = 0
            self.members[next(reversed(self.members))].append(name)
            size += 2 * torch.Size(shape).numel()
        self.most_on_disk = 0

    @property
    def weight_map(self):
        return {f"model.{name}": file for file, names in self.members.items() for name in names}

    def path(self, file):
        path = self.directory / file
        if not path.exists():
            generator = torch.Generator().manual_seed(sum(file.encode()))
            save_file({f"model.{name}": self._random(name, generator) for name in self.members[file]}, path)
            self.most_on_disk = max(self.most_on_disk, len(list(self.directory.iterdir())))
        return path

    def release(self, file):
        (self.directory / file).unlink()

    def _random(self, name, generator):
        shape = self.shapes[name]
        return torch.empty(shape, dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5, generator=generator)


def run(directory, arguments, recipe):
    """Fused experts, as far as there are any."""
    source, shards, target = (directory / name for name in ("source", "shards", "target"))
    source.mkdir(parents=True)
    shards.mkdir()
    config = parse_config(text_config(arguments))
    fused = [f"layers.{i}.mlp.experts.gate_up_proj" for i in range(arguments.layers)] if arguments.experts else []
    generated = GeneratedShards(shards, tensor_shapes(config, fused), arguments.per_shard)
    (source / "config.json").write_text(json.dumps(text_config(arguments)))
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": generated.weight_map}))
    manifest = convert(source, target, recipe, shards=generated)
    assert not list(shards.iterdir())
    return generated, manifest


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parser():
    options = argparse.ArgumentParser()
    for name, default in (("hidden", 512), ("layers", 12), ("experts", 0), ("width", 2048), ("vocab", 4096)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--per-shard", type=int, default=PER_SHARD)
    options.add_argument("--recipe", default="w4")
    return options


def main():
    arguments = parser().parse_args()
    with tempfile.TemporaryDirectory() as directory:
        small = argparse.Namespace(hidden=256, layers=4, experts=0, width=256, vocab=128, per_shard=PER_SHARD)
        run(Path(directory) / "small", small, arguments.recipe)
        before = peak_bytes()
        shards, manifest = run(Path(directory) / "large", arguments, arguments.recipe)
    report = {
        "before_bytes": before,
        "peak_bytes": peak_bytes(),
        "source_bytes": sum(2 * torch.Size(shape).numel() for shape in shards.shapes.values()),
        "shards": len(shards.members),
        "most_shards_on_disk": shards.most_on_disk,
        "artifact_bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "errors": manifest["errors"],
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
