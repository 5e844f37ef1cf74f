"""What an engine would hold, before there is one: `python -m engine.plan --profile 35b-a3b --recipe w4 --memory 24GiB`.

Prints every byte by its use. Returns 1 when the memory does not hold it, with what would fit and what would help.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Self

from pydantic import ByteSize, Field, model_validator

from config import ConfigError, load
from config.engine import BLOCK_SIZE
from config.load import usage
from config.output import while_read
from config.section import Section
from engine.checkpoint_dir import resolve_checkpoint
from engine.errors import CheckpointError
from engine.models.config import PROFILES, ModelConfig, read_config
from engine.planner import Demand, context_limit, explain, gib, num_snapshots, one_snapshot, plan

_PROFILES = dict(zip(("35b-a3b", "27b"), PROFILES.values(), strict=True))


class PlanConfig(Section):
    """What is to be held, and by how much memory. Counts are tokens unless the name says otherwise."""

    profile: Literal["35b-a3b", "27b"] = "35b-a3b"
    """Dimensions of a published model."""

    checkpoint: str | None = None
    """A checkpoint or artifact, in place of a profile."""

    recipe: Literal["w4", "a3b", "w8", "bf16"] | None = None
    """How weights are stored; the artifact's own, or bf16, when not set."""

    codec: Literal["bf16", "int8-g64", "rk8v4", "rk4v4-e8"] = "bf16"
    """How keys and values are stored."""

    context: int | None = Field(default=None, ge=BLOCK_SIZE)
    """Longest prompt plus output; the model's limit when not set."""

    requests: int = Field(default=1, ge=1, le=64)
    """Requests that run at once, each up to the whole context."""

    kv_cache_tokens: int | None = Field(default=None, ge=BLOCK_SIZE)
    """Tokens of all requests together; requests times context when not set."""

    memory: ByteSize = ByteSize(24 * 2**30)
    """Of the card, like 24GiB; what others use of it is not to be counted."""

    mtp: Literal["off", "full", "window"] = "full"
    """Whether drafts are made, and whether with keys and values of the whole context or of its beginning and end."""

    mtp_window: int = Field(default=4096, ge=BLOCK_SIZE, multiple_of=BLOCK_SIZE)
    """Newest tokens that a windowed MTP sees, beside the first 64."""

    drafts: int = Field(default=3, ge=0, le=7)
    """Tokens that MTP proposes per step; 0 turns it off."""

    embedding: Literal["device", "host"] = "device"
    """Where the embedding table lies; a row of it is read per token."""

    snapshots: ByteSize = ByteSize(0)
    """Memory for recurrent states that stand for reuse, like 1GiB."""

    host_cache: ByteSize = ByteSize(0)
    """Host memory for the prefix cache's copies, like 8GiB; takes some staging on the card."""

    prefill_chunk: int = Field(default=512, ge=BLOCK_SIZE, multiple_of=BLOCK_SIZE)
    """Prompt tokens computed in one step."""

    yarn: bool = False
    """Positions beyond the model's own limit."""

    as_json: bool = False
    """Print the plan as JSON."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.checkpoint is not None and "profile" in self.model_fields_set:
            raise ValueError("set either profile or checkpoint")
        return self


def main() -> int:
    sections = {"plan": PlanConfig}
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage("engine.plan", sections))
        return 0
    try:
        asked = load(sections, sys.argv[1:])["plan"]
        demand = demand_of(asked)
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    return report(demand, int(asked.memory), asked.as_json)


def report(demand: Demand, budget: int, as_json: bool) -> int:
    """Prints the plan; 1 when it does not fit."""
    found = plan(demand)
    fits = found.num_bytes <= budget
    if as_json:
        shares = [asdict(share) for share in found.shares]
        print(json.dumps({"fits": fits, "budget": budget, "num_bytes": found.num_bytes, "shares": shares}, indent=2))
    else:
        print(_heading(demand))
        print(found.table(budget))
    if not fits:
        print(f"It does not fit {gib(budget)}: {explain(demand, found, budget)}", file=sys.stderr)
    return 0 if fits else 1


def demand_of(asked: PlanConfig) -> Demand:
    """raises  ConfigError when the context is beyond the model's limit; CheckpointError"""
    model, recipe = _model(asked)
    limit = context_limit(model, asked.yarn)
    context = asked.context or limit
    if context > limit:
        advice = "" if asked.yarn else ", or --yarn=true"
        raise ConfigError(f"context {context} is more than the model's limit: set it to {limit} or less{advice}")
    mtp = asked.mtp if asked.drafts else "off"
    demand = Demand(
        config=model,
        recipe=asked.recipe or recipe,
        codec=asked.codec,
        num_drafts=asked.drafts if mtp != "off" else 0,
        mtp=mtp,
        mtp_window=asked.mtp_window,
        is_embedding_on_host=asked.embedding == "host",
        prefill_chunk=asked.prefill_chunk,
    ).with_full(context, asked.requests)
    tokens = asked.kv_cache_tokens or demand.kv_cache_tokens
    demand = demand.having(kv_cache_tokens=tokens, host_cache_bytes=int(asked.host_cache))
    return demand.having(num_snapshots=num_snapshots(demand, int(asked.snapshots)))


def _model(asked: PlanConfig) -> tuple[ModelConfig, str | None]:
    """Dimensions, and the recipe of what is stored."""
    if asked.checkpoint is None:
        return _PROFILES[asked.profile], "bf16"
    directory = Path(resolve_checkpoint(asked.checkpoint))
    return read_config(directory), _stored_recipe(directory)


def _stored_recipe(directory: Path) -> str | None:
    # only here: reading artifacts takes torch, which takes seconds to import
    from engine.models.artifact import is_artifact, read_manifest

    return read_manifest(directory).recipe if is_artifact(directory) else None


def _heading(demand: Demand) -> str:
    one = gib(one_snapshot(demand))
    return (
        f"{demand.num_requests} requests of {demand.context} tokens, {demand.num_blocks} blocks, "
        f"weights {demand.recipe or 'as stored'}, KV {demand.codec}, MTP {demand.mtp if demand.has_mtp else 'off'}, "
        f"{demand.num_snapshots} snapshots of {one}"
    )


if __name__ == "__main__":
    sys.exit(while_read(main))
