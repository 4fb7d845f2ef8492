"""Sampling, scoring, the objectives and the gradient, against slow code that shares none of theirs.

The policy is a random Qwen3 of 20 tokens `t0` to `t19`; `t0` and `t1` end a text.
"""

import copy
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import ibpo_minimal
from ibpo_minimal import (
    CREDITS,
    OBJECTIVES,
    Batch,
    Config,
    CreditedRow,
    Group,
    Policy,
    Trajectory,
    dapo,
    gradient,
    gspo,
    microbatches,
    old_logprobs,
    revise,
    rollout,
    sample,
    token_logprobs,
    train_step,
    update,
)
from toy_tasks import Problem
from toy_tasks.base import Verdict

torch.set_num_threads(1)
VOCABULARY = 20
ENDS = [0, 1]
NEVER = [VOCABULARY + 1]  # an end token that no text holds
PROMPTS = [[3, 4, 5], [6], [2, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]
KINDS = sorted(OBJECTIVES)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model folder, as a user would name it with --model."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, intermediate_size=32, max_position_embeddings=128,
            tie_word_embeddings=True, initializer_range=0.4, eos_token_id=ENDS, bos_token_id=None,
        )
    )  # fmt: skip
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t19"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="t19", eos_token="t0"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(folder):
    config = Config(model=str(folder), device="cpu", dtype="float32")
    return Policy(config, SimpleNamespace(max_tokens=6, words=False))


def with_ends(policy, ends):
    policy = copy.copy(policy)
    policy.end_ids = ends
    return policy


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def alone(policy, prompt, ids, temperature=1.0):
    """Log-probabilities of one completion by one plain forward pass: no cache, no padding."""
    logits = policy.model(torch.tensor([prompt + ids]), use_cache=False).logits[0].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return torch.stack([logprobs[len(prompt) - 1 + t, ids[t]] for t in range(len(ids))])


def close(found, expected, within=1e-5):
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    return torch.allclose(found, expected, rtol=0, atol=within)


# ---- Log-probabilities ---------------------------------------------------------------------------

RAGGED = [
    (PROMPTS[0], [5, 6, 7, 0]),
    (PROMPTS[1], [1]),
    (PROMPTS[2], [9, 9, 4, 3, 2, 8, 11, 0]),
    (PROMPTS[1], [4, 4, 4, 4, 4, 4]),
    (PROMPTS[0], [5, 6, 0]),
    (PROMPTS[0], [0]),
]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_a_plain_forward_pass_of_each_row(policy, temperature):
    logprobs_BT, entropy_BT, mask_BT = token_logprobs(policy, RAGGED, temperature)
    assert mask_BT.sum(-1).tolist() == [len(ids) for _, ids in RAGGED]
    for b, (prompt, ids) in enumerate(RAGGED):
        assert mask_BT[b].tolist() == [t < len(ids) for t in range(mask_BT.shape[1])]
        assert close(logprobs_BT[b, : len(ids)], alone(policy, prompt, ids, temperature))
        logits = policy.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        entropies = torch.distributions.Categorical(logits=logits / temperature).entropy()
        assert close(entropy_BT[b, : len(ids)], entropies)


def test_token_logprobs_of_one_token_completions_need_the_prompts_only(policy):
    texts = [(PROMPTS[0], [0]), (PROMPTS[2], [5]), (PROMPTS[0], [7])]
    policy.processed = 0
    logprobs_BT, _, mask_BT = token_logprobs(policy, texts, 1.0)
    assert policy.processed == len(PROMPTS[0]) + len(PROMPTS[2])
    assert mask_BT.all()
    for row, (prompt, ids) in zip(logprobs_BT, texts, strict=True):
        assert close(row, alone(policy, prompt, ids))


def test_a_repeated_prompt_goes_through_the_model_once(policy):
    policy.processed = 0
    token_logprobs(policy, [(PROMPTS[2], [4, 5, 0]), (list(PROMPTS[2]), [6, 0])], 1.0)
    # the prompt, and of each completion all tokens but the last of the widest
    assert policy.processed == len(PROMPTS[2]) + 2 + 2


def test_padding_may_be_any_token_even_an_end_token(policy):
    expected, _, mask_BT = token_logprobs(policy, RAGGED, 1.0)
    for pad in (0, 7):
        policy.pad_id = pad
        found, _, _ = token_logprobs(policy, RAGGED, 1.0)
        assert close(found[mask_BT], expected[mask_BT])


@pytest.mark.parametrize("budget", [1, 9, 4096])
def test_old_logprobs_come_back_in_order_whatever_the_micro_batches(policy, budget):
    config = Config(temperature=0.7, microbatch_tokens=budget)
    found = old_logprobs(policy, RAGGED, config)
    for row, (prompt, ids) in zip(found, RAGGED, strict=True):
        assert len(row) == len(ids) and close(row, alone(policy, prompt, ids, 0.7))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 30),
)
def test_micro_batches_hold_every_text_once_within_their_budget(shapes, budget):
    texts = [([p], [5] * n) for p, n in shapes]
    found = list(microbatches(texts, budget))
    assert sorted(i for batch in found for i in batch) == list(range(len(texts)))
    for batch in found:
        padded = len(batch) * max(len(texts[i][1]) for i in batch)
        assert batch and (padded <= budget or len(batch) == 1)
    if budget >= len(texts) * max(n for _, n in shapes):
        assert len(found) == 1


# ---- Sampling ------------------------------------------------------------------------------------


def test_recorded_logprobs_are_those_of_a_fresh_forward_pass_at_the_same_temperature(policy):
    ys = sample(with_ends(policy, [0, 1, 2, 3, 4]), PROMPTS, 6, 12, 0.7, generator())
    assert len(ys) == 18
    lengths = {len(y.token_ids) for y in ys}
    assert len(lengths) > 3 and max(lengths) == 12  # ended rows were dropped on the way
    for i, y in enumerate(ys):
        assert close(y.logprobs, alone(policy, PROMPTS[i // 6], y.token_ids, 0.7))


def test_a_sample_ends_with_its_first_end_token_or_at_the_limit(policy):
    ys = sample(policy, PROMPTS, 12, 10, 1.0, generator())
    seen = Counter()
    for y in ys:
        assert 1 <= len(y.token_ids) == len(y.logprobs) <= 10
        assert not set(y.token_ids[:-1]) & set(ENDS)
        assert y.finished == (y.token_ids[-1] in ENDS)
        assert y.finished or len(y.token_ids) == 10
        assert y.text == policy.tokenizer.decode(y.token_ids[: len(y.token_ids) - y.finished])
        seen[y.token_ids[-1] if y.finished else None] += 1
    assert set(seen) == {0, 1, None}


def test_the_end_tokens_are_those_of_the_model_and_of_the_tokenizer(folder):
    config = Config(model=str(folder), device="cpu", dtype="float32")
    policy = Policy(config, SimpleNamespace(max_tokens=6, words=False))
    assert policy.end_ids == ENDS


def test_an_end_token_at_the_limit_is_an_ending(policy):
    ys = sample(with_ends(policy, list(range(VOCABULARY))), PROMPTS, 2, 1, 1.0, generator())
    assert all(y.finished and len(y.token_ids) == 1 and y.text == "" for y in ys)


def forwards(policy, monkeypatch):
    """The number of rows of each forward pass that the policy makes from now on."""
    rows, forward = [], policy.forward

    def counted(ids, *rest, **named):
        rows.append(ids.shape[0])
        return forward(ids, *rest, **named)

    monkeypatch.setattr(policy, "forward", counted)
    return rows


def test_sampling_stops_when_every_text_has_ended(policy, monkeypatch):
    policy = with_ends(policy, list(range(VOCABULARY)))
    rows = forwards(policy, monkeypatch)
    sample(policy, PROMPTS, 2, 50, 1.0, generator())
    assert rows == [3]  # the prompts


def test_the_limit_is_kept_and_a_text_that_reaches_it_is_not_finished(policy, monkeypatch):
    policy = with_ends(policy, NEVER)
    rows = forwards(policy, monkeypatch)
    ys = sample(policy, PROMPTS, 2, 7, 1.0, generator())
    assert all(len(y.token_ids) == 7 and not y.finished for y in ys)
    assert rows == [3] + [6] * 6  # the last token needs no pass of its own


def test_ended_rows_are_dropped(policy, monkeypatch):
    rows = forwards(policy, monkeypatch)
    ys = sample(policy, PROMPTS, 12, 12, 1.0, generator())
    for step, running in enumerate(rows[1:], 1):
        alive = sum(len(y.token_ids) > step for y in ys)
        assert alive <= running and alive > 0.75 * running
    assert rows[-1] < 36


def test_dropping_ended_rows_changes_no_other_row(policy, monkeypatch):
    prompts = [[a, b] for a in range(2, 10) for b in (3, 11)] + PROMPTS
    policy = with_ends(policy, [0, 4, 8, 12, 16])
    rows = forwards(policy, monkeypatch)
    together = sample(policy, prompts, 1, 10, 0.0, None)
    assert len(set(rows)) > 2  # rows were dropped, more than once
    assert len({len(y.token_ids) for y in together}) > 3
    for prompt, y in zip(prompts, together, strict=True):
        one = sample(policy, [prompt], 1, 10, 0.0, None)[0]
        assert (y.token_ids, y.finished, y.text) == (one.token_ids, one.finished, one.text)
        assert close(y.logprobs, one.logprobs)


def test_greedy_takes_the_most_likely_token_each_time(policy):
    for prompt, y in zip(PROMPTS, sample(policy, PROMPTS, 1, 8, 0.0, generator(1)), strict=True):
        ids = []
        while len(ids) < 8 and not (ids and ids[-1] in ENDS):
            ids.append(int(policy.model(torch.tensor([prompt + ids])).logits[0, -1].argmax()))
        assert y.token_ids == ids
        assert close(y.logprobs, alone(policy, prompt, ids))


def test_greedy_needs_no_seed_and_the_same_seed_gives_the_same_samples(policy):
    def run(temperature, seed):
        return sample(policy, PROMPTS, 4, 8, temperature, generator(seed))

    assert run(0.0, 1) == run(0.0, 2)
    assert run(1.0, 1) == run(1.0, 1) != run(1.0, 2)


def test_samples_are_drawn_at_the_temperature_they_record(policy):
    n, prompt = 4000, PROMPTS[0]
    for temperature in (0.5, 2.0):
        drawn = Counter(
            y.token_ids[0] for y in sample(policy, [prompt], n, 1, temperature, generator())
        )
        logits = policy.model(torch.tensor([prompt])).logits[0, -1]
        expected = (logits / temperature).softmax(-1).tolist()
        distance = sum(abs(drawn[v] / n - p) for v, p in enumerate(expected)) / 2
        assert distance < 0.04


def test_copies_of_a_prompt_stand_together_in_the_order_of_the_prompts(policy):
    ys = sample(with_ends(policy, NEVER), PROMPTS, 2, 5, 0.0, None)
    for i, prompt in enumerate(PROMPTS):
        one = sample(with_ends(policy, NEVER), [prompt], 1, 5, 0.0, None)[0]
        assert ys[2 * i].token_ids == ys[2 * i + 1].token_ids == one.token_ids


# ---- Scoring -------------------------------------------------------------------------------------


class Task:
    """Asks for a text with many `t5`: `rewards` maps their number to a reward."""

    max_tokens = 6
    words = False

    def __init__(self, rewards):
        self.rewards = rewards

    def problem(self, seed, index, split="train"):
        prompt = " ".join(f"t{2 + (seed + 7 * index + k) % 17}" for k in range(1 + index % 3))
        return Problem(prompt, "t5")

    def prompt(self, problem):
        return problem.prompt

    def compare_prompt(self, problem, attempt, reference):
        return f"{problem.prompt} t18 {attempt} t18 {reference}"

    def verify(self, problem, text):
        fives = text.split().count("t5")
        return Verdict(self.rewards(fives), "t5" if fives else None, "")


def test_rollout_gives_each_problem_its_own_scored_samples(policy):
    task, config = (
        Task(lambda fives: min(1.0, fives / 2)),
        Config(problems_per_step=5, group_size=4),
    )
    groups = rollout(policy, task, config, 3, generator())
    assert [g.problem for g in groups] == [task.problem(0, 15 + i) for i in range(5)]
    for group in groups:
        assert group.prompt_ids == policy.encode(group.problem.prompt)
        assert len(group.trajectories) == 4 and group.revisions == []
        for y in group.trajectories:
            assert len(y.token_ids) <= task.max_tokens
            assert close(y.logprobs, alone(policy, group.prompt_ids, y.token_ids))
            fives = y.text.split().count("t5")
            assert y.reward == min(1.0, fives / 2) and y.parsed == (fives > 0)
    assert len({y.reward for g in groups for y in g.trajectories}) > 1


def test_the_length_limit_of_the_config_replaces_that_of_the_task(policy):
    config = Config(problems_per_step=2, group_size=2, max_new_tokens=3)
    groups = rollout(with_ends(policy, NEVER), Task(lambda fives: 0.0), config, 0, generator())
    assert {len(y.token_ids) for g in groups for y in g.trajectories} == {3}


@pytest.mark.parametrize("name", ["ibpo", "resample"])
def test_a_repair_row_has_the_log_probabilities_of_the_plain_prompt(policy, name):
    task, config = Task(lambda fives: 1.0), Config(temperature=0.7)
    policy = with_ends(policy, list(range(10)))
    groups = []
    for prompt in PROMPTS:
        ys = sample(policy, [prompt], 3, 6, 0.7, generator(5))
        for y in ys:
            y.reward = 0.0
        groups.append(Group(Problem(f"t{prompt[0]}", ""), prompt, ys))
    revise(policy, task, groups, CREDITS[name], config, ibpo_minimal.random.Random(0), generator())
    revisions = [(g, r) for g in groups for r in g.revisions]
    filled = [(g, r) for g, r in revisions if r.plain_logprobs is not None]
    assert filled
    for group, r in filled:
        ids = r.trajectory.token_ids
        assert len(ids) == len(r.plain_logprobs)
        assert close(r.plain_logprobs, alone(policy, group.prompt_ids, ids, 0.7))
        # a fresh sample was drawn from that very distribution, a repair from another
        assert close(r.plain_logprobs, r.trajectory.logprobs) == (name == "resample")


# ---- Objectives: exact gradients of a policy whose only parameter is its logits ------------------


def batch_of(old_BT, advantages_BT, mask_BT, tokens=None, rows=None):
    mask = torch.as_tensor(mask_BT, dtype=torch.bool)
    return Batch(
        old_logprobs=torch.as_tensor(old_BT, dtype=torch.float64),
        advantages=torch.as_tensor(advantages_BT, dtype=torch.float64),
        mask=mask,
        token_ids=torch.zeros(mask.shape, dtype=torch.long),
        group_B=torch.zeros(len(mask), dtype=torch.long),
        tokens=tokens or int(mask.sum()),
        rows=rows or len(mask),
    )


def coin(ratios_BT):
    """Logits of a fair coin for which token 0 has these ratios to its old probability."""
    ratios = torch.tensor(ratios_BT, dtype=torch.float64)
    logits = torch.zeros(*ratios.shape, 2, dtype=torch.float64, requires_grad=True)
    return logits, (math.log(0.5) - ratios.log())


def test_dapo_by_hand_clips_both_sides_for_both_signs_of_the_advantage():
    ratios = [[1.0, 1.5, 0.5, 1.0], [1.5, 0.5, 1.1, 9.0]]
    advantages = [[1.0, 1.0, 1.0, -1.0], [-1.0, -1.0, 0.0, 5.0]]
    mask = [[1, 1, 1, 1], [1, 1, 1, 0]]
    logits, old = coin(ratios)
    logprobs = logits.log_softmax(-1)[..., 0]
    loss, metrics = dapo(logprobs, batch_of(old, advantages, mask), Config())
    loss.backward()
    # the smaller of r A and clip(r) A: 1, 1.28, 0.5, -1 / -1.5, -0.8, 0
    assert loss.item() == pytest.approx(-(1 + 1.28 + 0.5 - 1 - 1.5 - 0.8 + 0) / 7)
    # d log pi / d logit of the chosen token = 1 - 0.5; so - r A 0.5 / 7, and 0 where a clip binds
    expected = [[-0.5, 0, -0.25, 0.5], [0.75, 0, 0, 0]]
    assert close(logits.grad[..., 0] * 7, expected, 1e-12)
    assert close(logits.grad.sum(-1), [[0.0] * 4] * 2, 1e-12)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 7)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 7)
    assert metrics["ratio/mean"] == pytest.approx((1 + 1.5 + 0.5 + 1 + 1.5 + 0.5 + 1.1) / 7)


def test_dapo_uses_the_clips_of_the_config():
    logits, old = coin([[1.5, 1.5, 0.5, 0.5]])
    batch = batch_of(old, [[1.0, -1.0, 1.0, -1.0]], [[1] * 4])
    loss, metrics = dapo(logits.log_softmax(-1)[..., 0], batch, Config(clip_low=0.4, clip_high=1.6))
    loss.backward()
    assert (logits.grad[..., 0] != 0).all()
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/low_mean"] == 0


def test_gspo_by_hand_keeps_per_token_advantages_and_clips_whole_sequences():
    # log ratios; s = exp(their mean over ALL completion tokens), clipped to [1 - 3e-4, 1 + 4e-4]
    log_ratios = torch.tensor(
        [
            [1e-4, 3e-4, 0.0],  # 2 tokens: s = exp(2e-4), inside
            [0.3, 0.3, 0.3],  # s = exp(0.3), above: binds for A > 0 only
            [-0.9, 0.0, 0.0],  # s = exp(-0.3), below: binds for A < 0 only
        ],
        dtype=torch.float64,
    )
    advantages = [[1.0, 3.0, 9.0], [1.0, -2.0, 0.0], [1.0, -2.0, 0.0]]
    mask = [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    logits = torch.zeros(3, 3, 2, dtype=torch.float64, requires_grad=True)
    batch = batch_of(math.log(0.5) - log_ratios, advantages, mask)
    loss, metrics = gspo(logits.log_softmax(-1)[..., 0], batch, Config())
    loss.backward()
    # -s A_t 0.5 / length / 3 rows
    a, b, c = math.exp(2e-4), math.exp(0.3), math.exp(-0.3)
    expected = [
        [-a * 0.5 / 6, -3 * a * 0.5 / 6, 0],
        [0, 2 * b * 0.5 / 9, 0],
        [-c * 0.5 / 9, 0, 0],
    ]
    assert close(logits.grad[..., 0], expected, 1e-12)
    value = 4 * a / 2 + (1.0004 - 2 * b) / 3 + (c - 2 * 0.9997) / 3
    assert loss.item() == pytest.approx(-value / 3, abs=1e-12)
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/low_mean"] == 1 / 8


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_on_policy_gradient_is_the_plain_policy_gradient(kind):
    torch.manual_seed(1)
    advantages = torch.randn(3, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    logits = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)[..., 2]
    loss, metrics = OBJECTIVES[kind](
        logprobs, batch_of(logprobs.detach(), advantages, mask), Config()
    )
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    weights = 1 / 7 if kind == "dapo" else 1 / mask.sum(-1, keepdim=True).double() / 3
    plain = -(advantages * logprobs * mask * weights).sum()
    assert close(found, torch.autograd.grad(plain, logits)[0], 1e-12)
    assert close(loss.item(), -(advantages * mask * weights).sum().item(), 1e-12)
    assert metrics["ratio/mean"] == pytest.approx(1)
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/low_mean"] == 0


def slow_gradient(kind, logits, ids, old, advantages, lengths, config):
    """The loss, and its gradient with respect to the logits, one number at a time."""
    loss, grad = 0.0, torch.zeros_like(logits)
    for b, length in enumerate(lengths):
        probabilities = [logits[b, t].softmax(-1) for t in range(length)]
        ratios = [(probabilities[t][ids[b, t]] / old[b, t].exp()).item() for t in range(length)]
        low, high, share = config.clip_low, config.clip_high, 1 / sum(lengths)
        if kind == "gspo":
            ratios = [math.prod(ratios) ** (1 / length)] * length
            low, high, share = 1 - 3e-4, 1 + 4e-4, 1 / length / len(lengths)
        for t in range(length):
            r, a = ratios[t], advantages[b, t].item()
            loss -= share * min(r * a, min(max(r, low), high) * a)
            if (a > 0 and r > high) or (a < 0 and r < low):
                continue
            for v in range(logits.shape[-1]):
                grad[b, t, v] -= share * r * a * (float(v == ids[b, t]) - probabilities[t][v])
    return loss, grad


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 2e-4, 0.4]),
)
def test_objectives_equal_a_slow_loop_off_policy(kind, lengths, seed, distance):
    g = torch.Generator().manual_seed(seed)
    shape, config = (len(lengths), max(lengths)), Config(clip_low=0.9, clip_high=1.2)
    logits = torch.randn(*shape, 3, generator=g, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 3, shape, generator=g)
    advantages = torch.randn(shape, generator=g, dtype=torch.float64).round(decimals=1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    old = logprobs.detach() + distance * torch.randn(shape, generator=g, dtype=torch.float64)
    expected = slow_gradient(kind, logits.detach(), ids, old, advantages, lengths, config)
    old, advantages = (
        old.masked_fill(~mask, math.nan),
        advantages.masked_fill(~mask, 7.0),
    )  # garbage
    loss, _ = OBJECTIVES[kind](logprobs, batch_of(old, advantages, mask), config)
    loss.backward()
    assert loss.item() == pytest.approx(expected[0], abs=1e-9)
    assert close(logits.grad, expected[1], 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("old", [-1000.0, 1000.0])
def test_a_ratio_beyond_all_bounds_gives_finite_numbers(kind, old):
    logits = torch.zeros(1, 2, 2, requires_grad=True)
    batch = batch_of([[old, old]], [[1.0, -1.0]], [[1, 1]])
    batch.old_logprobs, batch.advantages = batch.old_logprobs.float(), batch.advantages.float()
    loss, metrics = OBJECTIVES[kind](logits.log_softmax(-1)[..., 0], batch, Config())
    loss.backward()
    assert torch.isfinite(logits.grad).all() and math.isfinite(loss.item())
    assert all(map(math.isfinite, metrics.values()))


# ---- The gradient of an update -------------------------------------------------------------------


def make_groups(policy, noise=0.3, temperature=0.7):
    """Three groups of ragged rows, off-policy by `noise`; group 1 repeats the prompt of group 0."""
    g = generator(3)
    groups = []
    for prompt, lengths in ((PROMPTS[0], (4, 1, 7)), (PROMPTS[0], (2, 9)), (PROMPTS[2], (5, 3))):
        rows = []
        for n in lengths:
            ids = torch.randint(0, VOCABULARY, (n,), generator=g).tolist()
            with torch.no_grad():
                old = alone(policy, prompt, ids, temperature)
            old = (old + noise * torch.randn(n, generator=g)).tolist()
            advantages = (torch.randn(n, generator=g) * (torch.rand(n, generator=g) > 0.2)).tolist()
            rows.append(CreditedRow(list(prompt), ids, old, advantages))
        groups.append(rows)
    return groups


def flat_gradient(policy):
    """The accumulated gradient as one vector, which is then cleared."""
    found = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    policy.model.zero_grad()
    return found


def gradient_of(policy, groups, config):
    policy.model.zero_grad()
    metrics = gradient(policy, groups, config)
    return flat_gradient(policy), metrics


def slow_update_gradient(policy, groups, config):
    """The gradient from one plain forward pass for each row, and the loss in plain Python."""
    policy.model.zero_grad()
    rows = [row for group in groups for row in group]
    tokens, total = sum(len(row.token_ids) for row in rows), 0.0
    for row in rows:
        logprobs = alone(policy, row.prompt_ids, row.token_ids, config.temperature)
        low, high, share = config.clip_low, config.clip_high, 1 / tokens
        ratios = (logprobs - torch.tensor(row.old_logprobs)).exp()
        if config.objective == "gspo":
            s = ratios.detach().log().mean().exp()
            ratios = s * (logprobs - logprobs.detach()).exp()
            low, high, share = 1 - 3e-4, 1 + 4e-4, 1 / len(row.token_ids) / len(rows)
        for ratio, a in zip(ratios, row.advantages, strict=True):
            bound = high if a > 0 else low
            kept = ratio if (ratio < bound if a > 0 else ratio > bound) else torch.tensor(bound)
            total = total - share * kept * a
    total.backward()
    return flat_gradient(policy), total.item()


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 7, 20, 4096])
def test_micro_batches_padding_and_shared_prompts_change_no_gradient(policy, kind, budget, noise):
    config = Config(temperature=0.7, objective=kind, microbatch_tokens=budget)
    groups = make_groups(policy, noise)
    before = copy.deepcopy(groups)
    expected, loss = slow_update_gradient(policy, groups, config)
    found, metrics = gradient_of(policy, groups, config)
    assert groups == before
    assert expected.abs().max() > 0.05
    assert close(found, expected)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_do_not_depend_on_the_micro_batches(policy, kind):
    groups = make_groups(policy)

    def metrics(budget):
        config = Config(temperature=0.7, objective=kind, microbatch_tokens=budget)
        return dict(gradient_of(policy, groups, config)[1])

    assert metrics(1) == pytest.approx(metrics(20), abs=1e-5)
    assert metrics(1) == pytest.approx(metrics(4096), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [20, 4096])
def test_the_order_of_rows_and_groups_changes_no_gradient(policy, kind, budget):
    config = Config(temperature=0.7, objective=kind, microbatch_tokens=budget)
    groups = make_groups(policy)
    expected, _ = gradient_of(policy, groups, config)
    turned = [rows[::-1] for rows in (groups[2], groups[0], groups[1])]
    assert close(gradient_of(policy, turned, config)[0], expected)


@pytest.mark.parametrize("budget", [20, 4096])
def test_a_row_without_credit_counts_in_the_denominator_and_nowhere_else(policy, budget):
    config = Config(temperature=0.7, microbatch_tokens=budget)
    groups = make_groups(policy)
    tokens = sum(len(row.token_ids) for rows in groups for row in rows)
    long = CreditedRow([5] * 30, [6] * 40, [-3.0] * 40, [0.0] * 40)  # pads all the others too
    alone_gradient, _ = gradient_of(policy, groups, config)
    found, _ = gradient_of(policy, [groups[0] + [long], *groups[1:]], config)
    assert close(found * (tokens + 40) / tokens, alone_gradient)
    nothing, metrics = gradient_of(policy, [[long]], config)
    assert not nothing.any() and metrics["loss"] == 0


def test_the_ratio_of_fresh_samples_is_1_and_their_gradient_the_plain_policy_gradient(policy):
    config = Config(temperature=0.7, microbatch_tokens=20)
    ys = sample(policy, PROMPTS, 4, 8, 0.7, generator())
    groups = [
        [
            CreditedRow(
                prompt, y.token_ids, y.logprobs, [(-1.0) ** (k + t) * (1 + t) for t in range(n)]
            )
            for k, y in enumerate(ys[4 * i : 4 * i + 4])
            for n in [len(y.token_ids)]
        ]
        for i, prompt in enumerate(PROMPTS)
    ]
    found, metrics = gradient_of(policy, groups, config)
    rows = [row for group in groups for row in group]
    tokens = sum(len(row.token_ids) for row in rows)
    plain = sum(
        -(torch.tensor(r.advantages) * alone(policy, r.prompt_ids, r.token_ids, 0.7)).sum()
        for r in rows
    )
    (plain / tokens).backward()
    assert close(found, flat_gradient(policy))
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_ratio/low_mean"] == metrics["clip_ratio/high_mean"] == 0
    assert metrics["loss"] == pytest.approx(
        -sum(sum(row.advantages) for row in rows) / tokens, abs=1e-5
    )


# ---- The update ----------------------------------------------------------------------------------


def test_an_update_takes_one_step_of_clipped_gradient_for_each_mini_batch(policy):
    groups = make_groups(policy)
    config = Config(temperature=0.7, minibatches=2, max_grad_norm=0.5)
    other = copy.copy(policy)
    other.model = copy.deepcopy(policy.model)
    norms = []
    for part in ([groups[0], groups[2]], [groups[1]]):  # dealt out in turn
        g, _ = slow_update_gradient(other, part, config)
        norms.append(g.norm().item())
        assert norms[-1] > 0.5  # so the clip binds
        step = 0.1 * g * 0.5 / (norms[-1] + 1e-6)
        with torch.no_grad():
            for p, d in zip(
                other.model.parameters(),
                step.split([p.numel() for p in other.model.parameters()]),
                strict=True,
            ):
                p -= d.view_as(p)
    optimizer = torch.optim.SGD(policy.model.parameters(), 0.1)
    metrics = update(policy, optimizer, groups, config)
    for p, q in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert close(p, q)
        assert p.grad is None or not p.grad.any()  # nothing is left for the next update
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)


@pytest.mark.parametrize("given, expected", [(5, [[0, 2, 4], [1, 3]]), (1, [[0]])])
def test_mini_batches_hold_whole_groups_each_once(policy, monkeypatch, given, expected):
    seen, groups = [], [[f"row {i}a", f"row {i}b"] for i in range(given)]

    def gradient(policy, part, config):
        seen.append([groups.index(group) for group in part])
        return Counter(loss=float(len(part)))

    monkeypatch.setattr(ibpo_minimal, "gradient", gradient)
    optimizer = torch.optim.SGD(policy.model.parameters(), 0.1)
    metrics = update(policy, optimizer, groups, Config(minibatches=2))
    assert sorted(i for part in seen for i in part) == list(range(given))
    assert len(seen) == len(expected)  # with fewer groups than mini-batches, fewer updates
    assert sorted(map(len, seen)) == sorted(map(len, expected))
    assert metrics["loss"] == pytest.approx(given / len(seen))  # the mean over the updates


def weights(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def moving_optimizer(policy):
    """AdamW with momentum from an earlier step: any further step, even of gradient 0, moves it."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), 1e-2, weight_decay=0.0)
    sum(p.square().sum() for p in policy.model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("name", CREDITS)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_step_in_which_every_group_is_flat_changes_no_weight_and_says_so(policy, name, reward):
    policy = with_ends(policy, list(range(VOCABULARY)))  # so every text is finished
    optimizer = moving_optimizer(policy)
    config = Config(problems_per_step=3, group_size=4, credit=name)
    before = weights(policy)
    row, _, credited = train_step(
        policy, optimizer, Task(lambda fives: reward), CREDITS[name], config, 0
    )
    assert torch.equal(weights(policy), before)
    assert row["frac_reward_zero_std"] == 1 and row["reward/mean"] == reward
    assert not any(a for rows in credited for r in rows for a in r.advantages)
    assert "loss" not in row and "grad_norm" not in row


@pytest.mark.parametrize("name", CREDITS)
def test_only_groups_that_are_not_flat_take_part_in_the_update(policy, name, monkeypatch):
    seen = []

    def record(policy, optimizer, groups, config):
        seen.extend(groups)
        return {}

    monkeypatch.setattr(ibpo_minimal, "update", record)
    config = Config(problems_per_step=12, group_size=3, credit=name)
    row, groups, credited = train_step(
        policy, moving_optimizer(policy), Task(lambda n: float(n > 0)), CREDITS[name], config, 0
    )
    live = [rows for rows in credited if any(a for r in rows for a in r.advantages)]
    assert 0 < len(live) < 12 and seen == live
    assert row["frac_reward_zero_std"] == pytest.approx(1 - len(live) / 12)


def test_a_step_is_a_function_of_the_seed_and_its_number(policy):
    class Same(Task):
        """The same problems whatever the seed and the step."""

        def problem(self, seed, index, split="train"):
            return super().problem(0, index % 4)

    def run(seed, step):
        mine = copy.copy(policy)
        mine.model = copy.deepcopy(policy.model)
        config = Config(problems_per_step=4, group_size=4, seed=seed, learning_rate=1e-2)
        _, groups, _ = train_step(
            mine,
            moving_optimizer(mine),
            Same(lambda n: float(n > 0)),
            CREDITS["ibpo"],
            config,
            step,
        )
        return groups, weights(mine)

    groups, after = run(0, 1)
    assert not torch.equal(after, weights(policy))
    again, after_again = run(0, 1)
    assert groups == again and torch.equal(after, after_again)
    for other in (run(1, 1)[0], run(0, 2)[0]):
        assert [g.problem for g in other] == [g.problem for g in groups] and other != groups


def test_scoring_and_updating_leave_the_samples_as_they_were(policy):
    y = Trajectory([5, 6, 0], [-1.0, -2.0, -3.0], "", True, 1.0)
    row = CreditedRow(PROMPTS[0], y.token_ids, y.logprobs, [1.0, 0.0, -1.0])
    before = copy.deepcopy((y, row, PROMPTS))
    token_logprobs(policy, [(row.prompt_ids, row.token_ids), RAGGED[2]], 1.0)
    update(policy, torch.optim.SGD(policy.model.parameters(), 0.1), [[row]], Config())
    assert (y, row, PROMPTS) == before
