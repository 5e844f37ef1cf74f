"""The pipeline end to end on a CPU, at toy size: rows, training, resuming, export, generation, acceptance."""

import json

import numpy as np
import pytest
import torch

from engine.embedded.acceptance import acceptance, draft_chain
from engine.embedded.decoder import Decoder, generate
from engine.embedded.delta_rule import CHUNK, chunk_delta_rule, recurrent_delta_rule
from engine.embedded.export import load_parameters, save_checkpoint
from engine.embedded.geometry import Geometry
from engine.embedded.ngram import NgramModel
from engine.embedded.rows import RowMaker, load_sources
from engine.embedded.skills.example import TEMPLATE_FILE
from engine.embedded.train import SharedProgress, Trainer, TrainSettings, to_batch, train
from engine.embedded.train_model import Packing, TrainModel, create_parameters, dequantise, quantise, working_weights
from engine.embedded.vocabulary import save_tokenizer, train_vocabulary

TOY = Geometry(
    vocab_size=512, hidden=128, layers=4, heads=2, kv_heads=1, head_dim=128, rotary=32, delta_key_heads=1,
    delta_value_heads=2, delta_head_dim=64, experts=4, experts_chosen=2, expert_width=128,
)  # fmt: skip
LENGTH = 128
FP64_CLOSE = {"rtol": 1e-9, "atol": 1e-10}
FP32_CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    text = "The river runs to the sea. A boat waits at the bridge. " * 12
    documents = [{"source": "toy", "text": text, "held_out": index == 0} for index in range(8)]
    documents.append({"source": "small_talk", "talk": ["Hi.", "Hello!"], "held_out": False})
    corpus, samples = directory / "corpus.jsonl", directory / "samples.jsonl"
    corpus.write_text("".join(json.dumps(item) + "\n" for item in documents))
    talk = {"talk": ["What is a boat?", "A boat is a small ship.", "Why?", "Because it floats."], "rest": ""}
    samples.write_text("".join(json.dumps(talk) + "\n" for _ in range(3)))
    tokenizer = train_vocabulary([text, "What is the secret code? Hello!"] * 4, TOY.vocab_size)
    return load_sources(corpus, samples, tokenizer)


@pytest.fixture(scope="module")
def geometry(sources):
    return Geometry(**TOY.__dict__ | {"vocab_size": sources.tokenizer.get_vocab_size()})


def toy_settings(geometry, **changes):
    values = {"rows": 1, "length": LENGTH, "draft_rows": 1, "workers": 0, "device": "cpu", "compiles": False}
    return TrainSettings(geometry=geometry, **values | changes)


def toy_batches(sources):
    maker = RowMaker(sources, LENGTH, seed=1)
    maker.odds = [float(kind in ("small_talk", "text", "chat")) for kind in maker.kinds]
    while True:
        rows = [maker.row(long_share=0.0, longest=0) for _ in range(1)]
        yield {name: np.stack([getattr(row, name) for row in rows]) for name in ("token_ids", "positions", "weights")}


def test_rows_are_full_and_documents_end_without_loss(sources):
    maker = RowMaker(sources, 1024, seed=2)
    for _ in range(10):
        row = maker.row(long_share=0.3, longest=800)
        assert row.token_ids.shape == row.positions.shape == row.weights.shape == (1024,)
        last = np.append(row.positions[1:] == 0, True)
        assert (row.weights[last] == 0).all()
        assert (row.weights[~last] > 0).all()


def test_only_answers_weigh_fully(sources):
    maker = RowMaker(sources, 1024, seed=3)
    token_ids, weights = maker.encode(maker.example("small_talk"), 1.0, 0.1)
    text = sources.tokenizer.decode(token_ids[weights == 1.0].tolist(), skip_special_tokens=False)
    assert text.endswith("<|im_end|>") and "<|im_start|>" not in text


def test_loss_falls_and_training_resumes(sources, geometry, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.embedded.train.WARMUP_STEPS", 4)
    settings = toy_settings(geometry)
    trainer, stream = Trainer(settings), toy_batches(sources)
    first = trainer.step(to_batch(next(stream), settings), 0.0)
    for _ in range(15):
        last = trainer.step(to_batch(next(stream), settings), 0.0)
    assert last["loss"] < 0.7 * first["loss"]
    assert last["draft_1"] < first["draft_1"]
    trainer.save(tmp_path / "state.pt")
    resumed = Trainer(settings, seed=1)
    resumed.load(tmp_path / "state.pt")
    batch = to_batch(next(stream), settings)
    expected, found = trainer.step(batch, 0.0), resumed.step(batch, 0.0)
    assert found["loss"] == expected["loss"]
    assert resumed.step_count == trainer.step_count == 17


def test_training_by_the_clock_logs_and_stops(sources, geometry, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.embedded.train.LOG_EVERY", 1)
    settings = toy_settings(geometry, seconds=0.5)
    progress, log = SharedProgress(settings), tmp_path / "log.jsonl"
    train(Trainer(settings), toy_batches(sources), progress, log)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert entries[-1]["step"] >= 1 and "loss" in entries[-1]
    assert progress.value.value > 0


def test_export_keeps_what_training_rounds_to(sources, geometry, tmp_path):
    save_tokenizer(sources.tokenizer, tmp_path, TEMPLATE_FILE.read_text())
    parameters = create_parameters(geometry)
    save_checkpoint(parameters, geometry, tmp_path)
    loaded_geometry, loaded = load_parameters(tmp_path)
    assert loaded_geometry == geometry
    rounded = working_weights(parameters, torch.float32, rounds_to_fp8=True)
    assert set(loaded) == set(rounded)
    for name, value in rounded.items():
        torch.testing.assert_close(loaded[name], value, rtol=2**-8, atol=0)


def test_fp8_by_hand():
    weight = torch.zeros(128, 256)
    weight[0, 0], weight[3, 200] = 448.0, -7.0
    values, scale = quantise(weight)
    assert scale.tolist() == [[1.0, 7.0 / 448.0]]
    torch.testing.assert_close(dequantise(values, scale), weight)


def test_generation_equals_whole_passes(geometry):
    weights = working_weights(create_parameters(geometry), torch.float32, rounds_to_fp8=False)
    prompts = [[5], list(range(70)), list(range(100, 230))]
    outputs = generate(Decoder(geometry, weights), prompts, 5, stops=set())
    for prompt, output in zip(prompts, outputs, strict=True):
        for index, token_id in enumerate(output):
            assert greedy(TrainModel(geometry, weights), prompt + output[:index]) == token_id


def greedy(model, token_ids):
    padded = -(-len(token_ids) // CHUNK) * CHUNK
    ids = torch.tensor([token_ids + [0] * (padded - len(token_ids))])
    hidden = model.hidden(ids, Packing.of(torch.arange(padded).unsqueeze(0)))
    return int(model.logits(hidden[0, len(token_ids) - 1]).argmax())


def test_documents_in_a_row_do_not_see_each_other(geometry):
    model = TrainModel(geometry, working_weights(create_parameters(geometry), torch.float32, rounds_to_fp8=False))
    ids = torch.randint(0, geometry.vocab_size, (1, 128), generator=torch.Generator().manual_seed(1))
    packed = model.hidden(ids, Packing.of(torch.cat([torch.arange(50), torch.arange(78)]).unsqueeze(0)))
    alone = torch.cat([ids[:, 50:], ids[:, :50]], dim=1)
    single = model.hidden(alone, Packing.of(torch.arange(128).unsqueeze(0)))
    torch.testing.assert_close(packed[:, 50:], single[:, :78], **FP32_CLOSE)


def test_chunks_equal_recurrence_also_for_equal_keys():
    generator = torch.Generator().manual_seed(0)
    chunks, rows, heads, size = 2, 1, 2, 8
    q, k, v = (torch.randn(chunks, rows, heads, CHUNK, size, generator=generator).double() for _ in range(3))
    k[0] = k[0, :, :, :1]
    k = torch.nn.functional.normalize(k, dim=-1)
    log_alpha = -0.1 * torch.rand(chunks, rows, heads, CHUNK, generator=generator).double()
    beta = torch.rand(chunks, rows, heads, CHUNK, generator=generator).double()
    output, final = chunk_delta_rule(q, k, v, log_alpha, beta)
    state = torch.zeros(rows, heads, size, size).double()
    for chunk in range(chunks):
        for token in range(CHUNK):
            inputs = (x[chunk, :, :, token] for x in (q, k, v, log_alpha, beta))
            expected, state = recurrent_delta_rule(*inputs, state)
            torch.testing.assert_close(output[chunk, :, :, token], expected, **FP64_CLOSE)
    torch.testing.assert_close(final.view_as(state), state, **FP64_CLOSE)


def test_first_draft_of_a_chain_equals_the_trained_form(geometry):
    model = TrainModel(geometry, working_weights(create_parameters(geometry), torch.float32, rounds_to_fp8=False))
    ids = torch.arange(64).unsqueeze(0)
    packing = Packing.of(torch.arange(64).unsqueeze(0))
    hidden = model.hidden(ids, packing)
    chain = draft_chain(model, ids, hidden)
    torch.testing.assert_close(chain[0], model.draft_hidden(torch.roll(ids, -1, 1), hidden, packing), **FP32_CLOSE)


def test_acceptance_is_certain_when_target_and_drafts_are_uniform(geometry):
    parameters = create_parameters(geometry)
    parameters["head"].zero_()
    model = TrainModel(geometry, working_weights(parameters, torch.float32, rounds_to_fp8=False))
    chances = acceptance(model, list(range(40)), begin=5, temperature=0.6)
    torch.testing.assert_close(chances, torch.ones(31, 3))


def test_ngrams_by_hand():
    text = np.array([0, 1, 0, 1, 0, 2], dtype=np.uint16)
    # after token 0 (seen 3 times, 2 kinds) token 1 came twice; unigram P(1) = (2 + 3 / 4) / (6 + 3)
    unigram = (2 + 3 / 4) / 9
    expected = -np.log2((3 + 3 / 4) / 9) - np.log2((2 + 2 * unigram) / 5)
    assert NgramModel(text, 2, vocab_size=4).bits(np.array([0, 1], dtype=np.uint16)) == pytest.approx(expected)
