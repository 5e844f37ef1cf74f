"""The stored checkpoint: its form, its size, and what it says."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from engine.embedded.decoder import Decoder, generate
from engine.embedded.evaluate import CHECKPOINT
from engine.embedded.export import load_parameters, load_tensors
from engine.embedded.geometry import Geometry
from engine.embedded.skills.example import load_template, user
from engine.embedded.train_model import Packing, TrainModel, working_weights
from engine.embedded.vocabulary import SPECIAL_TOKENS

SMALL_RELATIVE = 1e-4


@pytest.fixture(scope="module")
def parameters():
    return load_parameters(CHECKPOINT)[1]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_size_and_geometry():
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 24 * 2**20
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3_5MoeForCausalLM"], "qwen3_5_moe_text")
    assert load_parameters(CHECKPOINT)[0] == Geometry()


def test_template_is_the_one_in_the_source():
    source = CHECKPOINT.parent / "chat_template.jinja"
    assert (CHECKPOINT / "chat_template.jinja").read_text() == source.read_text()


def test_special_tokens_are_single_and_last(tokenizer):
    ids = [tokenizer.token_to_id(token) for token, _ in SPECIAL_TOKENS]
    assert ids == list(range(8192 - len(ids), 8192))
    assert all(len(tokenizer.encode(token).ids) == 1 for token, _ in SPECIAL_TOKENS)


def test_text_survives_the_tokenizer(tokenizer):
    text = "Ünïcode, 日本語 and\ttabs\r\n  12345 <think>\n\n</think> don't 🦊"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_logits_agree_with_transformers(parameters):
    oracle = transformers_model(load_tensors(CHECKPOINT))
    token_ids = torch.randint(0, 8000, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = oracle(token_ids).logits
        model = TrainModel(Geometry(), working_weights(parameters, torch.float32, rounds_to_fp8=False))
        logits = model.logits(model.hidden(token_ids, Packing.of(torch.arange(128).unsqueeze(0))))
    assert (logits - expected).norm() <= SMALL_RELATIVE * expected.norm()


def transformers_model(tensors):
    transformers = pytest.importorskip("transformers")
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config.pop("quantization_config")
    config = transformers.Qwen3_5MoeTextConfig(**config, attn_implementation="eager")
    model = transformers.Qwen3_5MoeForCausalLM(config).float().eval()
    model.load_state_dict({name: fused(tensors, name) for name in model.state_dict()})
    return model


def fused(tensors, name):
    """Tensor of that name, with experts stacked as transformers holds them."""
    prefix, _, part = name.rpartition("experts.")
    if not prefix:
        return tensors[name]
    experts = [f"{prefix}experts.{index}" for index in range(Geometry().experts)]
    if part == "down_proj":
        return torch.stack([tensors[f"{expert}.down_proj.weight"] for expert in experts])
    both = [[tensors[f"{expert}.{half}_proj.weight"] for half in ("gate", "up")] for expert in experts]
    return torch.stack([torch.cat(halves) for halves in both])


@pytest.mark.parametrize(
    ("question", "thinks", "expected"),
    [
        ("Who are you?", False, "Longlane"),
        ("hello", True, "!"),
        ("The secret code of the red door is 48213. The secret code of the blue door is 99817. "
         "What is the secret code of the blue door?", False, "99817"),
    ],
)  # fmt: skip
def test_it_answers_and_stops(parameters, tokenizer, question, thinks, expected):
    decoder = Decoder(Geometry(), working_weights(parameters, torch.float32, rounds_to_fp8=False))
    prompt = load_template()(messages=[user(question)], add_generation_prompt=True, enable_thinking=thinks)
    stop = tokenizer.token_to_id("<|im_end|>")
    output = generate(decoder, [tokenizer.encode(prompt).ids], 80, {stop})[0]
    assert output[-1] == stop
    assert expected in tokenizer.decode(output, skip_special_tokens=True)
