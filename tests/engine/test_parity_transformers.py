"""The engine's decoder against transformers' on the same checkpoint."""

import pytest
import torch

from engine.models.weights import load_model
from tests.engine.checkpoints import FORMS, PROFILES, Geometry, oracle_model, write_checkpoint
from tests.engine.passes import CPU, Runner, relative_error

NUM_TOKENS = 300
# relative L2 of logits between two fp32 implementations of the same formulas
PARITY = 1e-4
GEOMETRY = Geometry()


@pytest.fixture(scope="module", params=PROFILES)
def profile(request):
    return request.param


@pytest.fixture(scope="module")
def oracle(profile):
    return oracle_model(profile, GEOMETRY)


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(0, GEOMETRY.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def expected(oracle, token_ids):
    with torch.no_grad():
        return oracle(token_ids[None]).logits[0]


@pytest.fixture(scope="module")
def model(profile, tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp(profile), profile, GEOMETRY), CPU, torch.float32)


def test_every_part_of_the_oracle_matters(profile, oracle, token_ids, expected):
    """Parity means something only where a part left out would show."""
    for name, parameter in oracle.named_parameters():
        if ".experts." in name:
            continue
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.zero_()
            changed = oracle(token_ids[None, :40]).logits[0]
            parameter.copy_(kept)
        assert relative_error(changed, expected[:40]) > 10 * PARITY, name


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_every_stored_form(profile, form, token_ids, expected, tmp_path):
    model = load_model(write_checkpoint(tmp_path, profile, GEOMETRY, form), CPU, torch.float32)
    logits = model.compute_logits(Runner(model).prefill(token_ids))
    assert relative_error(logits, expected) < PARITY
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_64_greedy_tokens(model, oracle, token_ids):
    prompt = token_ids[:40]
    # the mask said outright: transformers would take it from where the padding id stands in the prompt
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    reference = oracle.generate(prompt[None], attention_mask=mask, max_new_tokens=64, **settings)
    runner, generated = Runner(model), []
    hidden, accepted = runner.prefill(prompt)[-1:], 0
    for position in range(40, 104):
        generated.append(int(model.compute_logits(hidden).argmax()))
        hidden = runner.forward({0: generated[-1:]}, {0: position}, commits=False, accepted={0: accepted})
        accepted = 1
    assert generated == reference[0, 40:].tolist()
    assert len(set(generated)) > 8


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_prefill_in_chunks(model, token_ids, expected, chunk):
    logits = model.compute_logits(Runner(model).prefill(token_ids, chunk))
    assert relative_error(logits, expected) < PARITY


@pytest.mark.parametrize("prompt", [1, 65, 200])
def test_decode_token_by_token(model, token_ids, expected, prompt):
    runner = Runner(model)
    hidden = torch.cat([runner.prefill(token_ids[:prompt]), runner.decode(token_ids[prompt:], prompt)])
    assert relative_error(model.compute_logits(hidden), expected) < PARITY
