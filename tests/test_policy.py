"""The tiny policy: its tokenizer, its stores, and how well the shipped one corrects."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toy_tasks import make_task, policy
from toy_tasks.report import wilson

SMALL = policy.Recipe(hidden=16, layers=1, heads=2, key_value_heads=1, mlp=16, steps=2, batch=4)
TOKENIZER = policy.tiny_tokenizer()


@given(st.text(policy.ALPHABET.replace("<", ""), max_size=50))  # "<end>" is one token
def test_text_survives_the_tokenizer_one_token_a_character(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text) and TOKENIZER.decode(ids) == text


def test_foreign_characters_become_the_unknown_token():
    assert TOKENIZER.encode("1é") == [TOKENIZER.encode("1")[0], TOKENIZER.unk_token_id]


def test_a_demonstration_is_a_pure_function_of_its_index():
    task = make_task("carry_chain")
    assert policy.demonstration(task, 7) == policy.demonstration(task, 7)
    assert policy.demonstration(task, 7) != policy.demonstration(task, 8)


def test_the_loss_of_a_batch_is_a_weighted_mean_whatever_the_micro_batch():
    model = policy.tiny_model(SMALL, TOKENIZER)
    rows = [([5, 6, 7], 2, [8, 1]), ([9], 0, [10, 11, 12, 1]), ([5, 6], 1, [7, 1])]
    expected, weight = 0.0, 0.0
    for prompt, quoted, completion in rows:
        logits = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        for t in range(len(prompt) - quoted, len(prompt) + len(completion)):
            w = 1.0 if t >= len(prompt) else 0.25
            expected -= w * logits[t - 1, (prompt + completion)[t]].item()
            weight += w
    for micro_batch in (1, 2, 16):
        loss = policy.imitate(model, rows, 0.25, micro_batch)
        assert loss == pytest.approx(expected / weight, rel=1e-5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(policy.platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    monkeypatch.setattr(policy, "SHIPPED", tmp_path / "nothing shipped")
    return tmp_path / "ibpo"


def logits(model):
    return model(torch.tensor([[5, 6, 7]])).logits


def test_a_warm_start_is_trained_once_and_then_read_from_the_cache(cache, monkeypatch):
    task = make_task("column_addition", 2)
    first, _ = policy.tiny_policy(task, SMALL, quiet=True)
    monkeypatch.setattr(policy, "warm_start", None)
    again, _ = policy.tiny_policy(task, SMALL, quiet=True)
    assert torch.equal(logits(first), logits(again))


@pytest.mark.parametrize("harm", ["truncated", "flipped", "gone", "not json"])
def test_a_damaged_cache_is_said_in_one_line_and_built_again(cache, capsys, harm):
    task = make_task("column_addition", 2)
    first, _ = policy.tiny_policy(task, SMALL, quiet=True)
    (folder,) = cache.iterdir()
    weights, about = folder / "model.safetensors", folder / "warm_start.json"
    content = weights.read_bytes()
    if harm == "truncated":
        weights.write_bytes(content[:-9])
    elif harm == "flipped":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "gone":
        weights.unlink()
    else:
        about.write_text("{")
    capsys.readouterr()
    again, _ = policy.tiny_policy(task, SMALL, quiet=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(said) == 1 and str(folder) in said[0]
    assert torch.equal(logits(first), logits(again))
    assert weights.read_bytes() == content


def test_another_recipe_or_another_student_gives_another_key(monkeypatch):
    task = make_task("carry_chain")
    key = policy.fingerprint(task, SMALL)
    assert policy.fingerprint(task, policy.Recipe()) != key
    monkeypatch.setattr("toy_tasks.carry_chain.FORGETS", 0.6)
    assert policy.fingerprint(task, SMALL) != key


def test_a_cache_that_cannot_be_written_costs_only_the_cache(cache, capsys):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where a folder should be")
    policy.tiny_policy(make_task("column_addition", 2), SMALL, quiet=True)
    assert "could not be kept" in capsys.readouterr().err


# ---- the shipped policy --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["carry_chain", "worksheet"])
def test_a_shipped_policy_was_made_by_the_recipe_as_it_is_and_is_small(name):
    folder = policy.SHIPPED / name
    about = json.loads((folder / "warm_start.json").read_text())
    assert about["key"] == policy.fingerprint(make_task(name), policy.Recipe())
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 * 2**20


@pytest.fixture(scope="module")
def rates():
    torch.manual_seed(0)
    task = make_task("carry_chain")
    return policy.operator_rates(task, *policy.tiny_policy(task), problems=192)


def test_the_shipped_policy_repairs_more_with_a_solved_reference_than_with_any_other(rates):
    low, _ = wilson(*rates["solved"][:2])
    for other in ("failed", "other problem", "alone", "fresh"):
        _, high = wilson(*rates[other][:2])
        assert low > high, (other, rates)


def test_repairs_of_the_shipped_policy_are_closer_to_the_attempt_than_fresh_solutions(rates):
    assert 2 * rates["solved"][2] < rates["fresh"][2]


def test_the_shipped_policy_solves_between_15_and_40_percent_of_the_default_problems():
    task = make_task("carry_chain")
    model, tokenizer = policy.tiny_policy(task)
    torch.manual_seed(0)
    problems = [task.problem(0, i, "validation") for i in range(512)]
    prompts = [task.prompt(problem) for problem in problems]
    texts = policy.write_texts(model, tokenizer, prompts, task.max_tokens)
    solved = [
        task.verify(problem, text).reward for problem, text in zip(problems, texts, strict=True)
    ]
    assert 0.15 <= sum(solved) / len(solved) <= 0.40
