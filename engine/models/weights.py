"""From a directory, whichever form its weights have, to a model that is ready to run."""

from pathlib import Path

import torch

from engine.models.artifact import Artifact, is_artifact
from engine.models.checkpoint import Checkpoint
from engine.models.config import read_config
from engine.models.plain import build_model as build_plain
from engine.models.quantized import build_model as build_quantized
from engine.models.qwen3_5 import Qwen3_5


def load_model(
    checkpoint_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
    is_stretched: bool = False,
    drafts: bool = True,
    is_embedding_on_host: bool = False,
) -> Qwen3_5:
    """A checkpoint, or an artifact made of one.

    is_stretched          positions reach four times as far, as the checkpoint documents (YaRN)
    drafts                with MTP, if there is one
    is_embedding_on_host  the table of inputs lies in pinned host memory, where the GPU reads it; not with a tied head
    raises  CheckpointError naming the file, field or tensor that is not as the family has it, CapacityError
    """
    if is_artifact(checkpoint_dir):
        with Artifact(checkpoint_dir, device, ("embed_tokens",) if is_embedding_on_host else ()) as artifact:
            return build_quantized(artifact, device, dtype, is_stretched, drafts)
    config = read_config(checkpoint_dir)
    with Checkpoint(checkpoint_dir, config) as checkpoint:
        config = config if drafts else config.without_mtp()
        return build_plain(checkpoint, config, device, dtype, is_stretched, is_embedding_on_host)
