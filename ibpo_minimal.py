"""IBPO (Implicit Behavior Policy Optimization, arXiv 2604.13088 v2) in one file.

A language model learns reasoning from one final reward per text. GRPO spreads that reward evenly
over all tokens of the text. IBPO asks the policy itself where it went wrong: a failed attempt is
shown next to a sibling and corrected, and what the correction changed is where the credit goes.

For a prompt x, pi_old samples G trajectories y_1..y_G with terminal rewards R_i in [0, 1]:

    (1) compare and correct  yhat_ik ~ pi_old(. | x, y_i, y_ref)       for failures y_i  [abstract]
    (2) repair score         phi_i = mean_k 1[yhat_ik solved], 0 on solved y_i          [secondary]
    (3) shaped reward        R'_i = R_i + b phi_i                                       [secondary]
    (4) group advantage      A_i = (R'_i - mean R') / (std R' + 1e-4), ddof 1           [secondary]
    (5) token credit         A_it = A_i 1[t was changed by the correction]               [abstract]
    (6) a second row         (x, yhat_i), credited on what it changed, joins the group       [ours]
    (7) update               clipped policy gradient; one global count divides every token   [ours]

[abstract]: the authors' abstract or a co-author's page; [secondary]: a public reading note of the
paper; [ours]: left open by both. The README says more. Where this file departs from the paper:

  1. It was written without the full text. `Credit` holds each open point as a named switch.
  2. The policy never sees the right answer, and is not told whether the reference is right.
  3. Repairs become rows under the PLAIN prompt (6). They were sampled under the compare prompt: an
     implicit behaviour policy, equal to pi_old up to the first edit and off-policy after it. The
     ratio starts at 1 from pi_old(yhat | x), so such a row is biased, and we say so.
  4. A failure that its repair lifts above the group's mean is clamped at 0 (`clamp_failed`): the
     shaping would otherwise reinforce the very mistake that was repaired.

Run `python ibpo_minimal.py --compare`, then read from the top: each section uses only what stands
above it. Suffixes are shapes: _P problems, _G a group, _B rows, _T tokens, _V vocabulary.
"""

import dataclasses
import inspect
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rapidfuzz.distance import Levenshtein
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from toy_tasks import Problem, make_task
from toy_tasks.policy import tiny_policy
from toy_tasks.report import wilson
from toy_tasks.runs import Stop, need, parse_arguments, run_all, show, story_of, with_switches

# ---- 1. Configuration (the comment of a field is its --help) -------------------------------------


DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass
class Config:
    """One run. Every field is a command-line option."""

    task: str = "carry_chain"  # which toy task
    difficulty: int | None = None  # its size; default: the task's own
    model: str = "tiny"  # tiny, or a Hugging Face causal language model: name, folder or .gguf file
    credit: str = "ibpo"  # a preset of CREDITS
    switches: str = ""  # changes to the preset, e.g. "references=3,mask_solved=true"
    objective: str = "dapo"  # a name in OBJECTIVES
    steps: int = 40  # rollouts, each followed by `minibatches` updates
    seed: int = 0  # problems, sampling and pairing follow from it
    problems_per_step: int = 16  # P
    group_size: int = 8  # G, attempts at each problem
    temperature: float = 1.0  # of sampling; log-probabilities are divided by the same
    max_new_tokens: int | None = None  # length limit of a completion; default: the task's own
    learning_rate: float = 2e-4  # of AdamW, constant after `warmup` steps
    warmup: int = 3  # steps over which the learning rate rises
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    minibatches: int = 2  # updates a rollout; each holds whole groups
    microbatch_tokens: int = 4096  # tokens in one forward and backward pass; changes no gradient
    clip_low: float = 0.8  # the ratio's lower clip (objective dapo)
    clip_high: float = 1.28  # the ratio's upper clip (objective dapo)
    eval_every: int = 5  # steps between validations; 0: none
    validation_problems: int = 128  # problems of a validation
    test_problems: int = 512  # problems of the test before and after; 0: none
    output_dir: str = ""  # default: runs/TASK-CREDIT-seedSEED, or runs/TASK-compare
    device: str = "auto"  # auto, cpu, cuda or mps
    dtype: str = "auto"  # auto (bfloat16 on a GPU, float32 else), float32 or bfloat16

    def check(self):
        """Raise a one-line ValueError when a value cannot work."""
        v, groups = vars(self), self.problems_per_step
        least = dict(
            group_size=2, problems_per_step=1, minibatches=1, microbatch_tokens=1, steps=0,
            warmup=0, eval_every=0, validation_problems=1, test_problems=0,
        )  # fmt: skip
        for name, low in least.items():
            need(v[name] >= low, name, v[name], f"{low} and more")
        for name in ("temperature", "learning_rate", "max_grad_norm"):
            need(0 < v[name] < math.inf, name, v[name], "a positive number")
        need(0 < self.clip_low < 1, "clip_low", self.clip_low, "between 0 and 1")
        need(1 < self.clip_high < math.inf, "clip_high", self.clip_high, "more than 1")
        limit = self.max_new_tokens
        need(limit is None or limit >= 1, "max_new_tokens", limit, "1 and more")
        deal = f"at most problems_per_step = {groups}, to deal out whole groups"
        need(self.minibatches <= groups, "minibatches", self.minibatches, deal)
        choices = dict(objective=OBJECTIVES, credit=CREDITS, device=DEVICES, dtype=DTYPES)
        for name, allowed in choices.items():
            need(v[name] in allowed, name, v[name], ", ".join(allowed))
        credit = credit_of(self)
        most = f"at most group_size = {self.group_size}"
        need(credit.references <= self.group_size, "references", credit.references, most)
        shuffled = credit.reference_from == "other_problem"
        need(groups > shuffled, "problems_per_step", groups, "at least 2, to shuffle references")


# ---- 2. What is passed around --------------------------------------------------------------------


@dataclass
class Trajectory:
    """One sampled text. Ids travel from the sampler to the loss; text is for scoring and people.

    token_ids include the end token when it was sampled (then `finished`); logprobs are those of the
    sampling distribution (temperature included), one a token; reward is in [0, 1], None: unscored.
    """

    token_ids: list
    logprobs: list
    text: str
    finished: bool
    reward: float | None = 0.0
    parsed: bool = True  # whether the verifier found an answer

    @property
    def solved(self):
        return self.finished and self.reward is not None and self.reward >= 1.0


@dataclass
class Revision:
    """A correction of trajectory `of` of its group, sampled under the compare prompt.

    reference is the text it was compared with. plain_logprobs are pi_old(yhat | x), under the PLAIN
    prompt; they are filled in for the revisions that become rows.
    """

    of: int
    reference: str | None
    trajectory: Trajectory
    plain_logprobs: list | None = None


@dataclass
class Group:
    """A problem, its G attempts and their revisions."""

    problem: Problem
    prompt_ids: list
    trajectories: list
    revisions: list = field(default_factory=list)


@dataclass
class CreditedRow:
    """One row of the update: a completion under a prompt with one advantage PER TOKEN."""

    prompt_ids: list
    token_ids: list
    old_logprobs: list
    advantages: list

    def __post_init__(self):
        lengths = len(self.token_ids), len(self.old_logprobs), len(self.advantages)
        if len(set(lengths)) != 1 or not self.prompt_ids:
            raise ValueError(f"token_ids, old_logprobs, advantages have lengths {lengths}")


# ---- 3. Credit: what IBPO is ---------------------------------------------------------------------


def changed_tokens(a, b, a_finished=True, b_finished=True):
    """Which tokens of `a`, and which of `b`, a Levenshtein alignment of the two changes.

    A replaced or deleted token is changed. An insertion marks the token at the insertion point;
    past the end that is the end token, and nothing in a text that was cut off. Alignments are not
    unique; ours matches the whole common prefix to itself: up to there both texts are one decision
    path. Token ids in, two lists of bools out. [ours]

    >>> changed_tokens([1, 2, 3, 9], [1, 5, 3, 9])
    ([False, True, False, False], [False, True, False, False])
    >>> changed_tokens([1, 2, 9], [1, 7, 2, 9])
    ([False, True, False], [False, True, False, False])
    """
    prefix = 0
    while prefix < min(len(a), len(b)) and a[prefix] == b[prefix]:
        prefix += 1
    in_a, in_b = [False] * len(a), [False] * len(b)

    def mark_insertion(marks, position, finished):
        if position < len(marks):
            marks[position] = True
        elif finished and marks:
            marks[-1] = True

    for kind, i, j in Levenshtein.editops(a[prefix:], b[prefix:]).as_list():
        i, j = i + prefix, j + prefix
        if kind == "replace":
            in_a[i] = in_b[j] = True
        elif kind == "delete":
            in_a[i] = True
            mark_insertion(in_b, j, b_finished)
        else:
            in_b[j] = True
            mark_insertion(in_a, i, a_finished)
    return in_a, in_b


@dataclass(frozen=True)
class Credit:
    """The switches of the estimator. `CREDITS` holds the presets; all are [ours] unless marked.

    What a credit needs from sampling stands here too (`references` to `reference_from`); the
    training loop provides it.
    """

    counterfactuals: str = (
        "none"  # what masks a failure: none, revisions, siblings, or both in turn
    )
    references: int = (
        0  # K: each revised failure meets K-1 siblings; 1: none, 0: no revisions [sec.]
    )
    revised_failures_per_group: int | str = 0  # how many failures are revised: a number or "all"
    reference_from: str = "sibling"  # sibling, other_problem, or resample (a fresh sample instead)
    repair_bonus: float = 0.0  # b of (3); 0.3 = 0.6 x 0.5 is one reading of the note [secondary]
    clamp_failed: bool = False  # a failure never gets positive credit
    mask_failed: bool = False  # (5): only the changed tokens of a failure are credited [abstract]
    mask_solved: bool = False  # solved texts too, where they differ from their closest failure
    revision_rows: str = "none"  # none, or plain: (6), the closest repair of each revised failure
    uniform_rows: bool = False  # credit all tokens of such a row, not only the changed ones
    rows_in_baseline: bool = False  # such rows count in the group's mean and standard deviation
    max_edit_fraction: float = 0.5  # a counterfactual that changes more is a rewrite: no mask

    def __post_init__(self):
        for name, allowed in (
            ("counterfactuals", ("none", "revisions", "siblings", "both")),
            ("reference_from", ("sibling", "other_problem", "resample")),
            ("revision_rows", ("none", "plain")),
        ):
            need(getattr(self, name) in allowed, name, getattr(self, name), ", ".join(allowed))
        cap, k, b = self.revised_failures_per_group, self.references, self.repair_bonus
        count = isinstance(cap, int) and cap >= 0
        need(cap == "all" or count, "revised_failures_per_group", cap, "all, or 0 and more")
        none = f"0 exactly when no failure is revised (revised_failures_per_group = {cap})"
        need(isinstance(k, int) and k >= 0 and (k > 0) == (cap != 0), "references", k, none)
        need(0 <= b < math.inf, "repair_bonus", b, "0 and more")
        share = self.max_edit_fraction
        need(0 <= share <= 1, "max_edit_fraction", share, "0 to 1")

    def __call__(self, group):
        """Rows with one advantage per token, and counts for the metrics. Pure."""
        return credit_group(group, self)


LEAN = Credit("both", 2, 1, mask_failed=True, revision_rows="plain", rows_in_baseline=True)
ROWS = Credit("revisions", 2, 1, revision_rows="plain", uniform_rows=True, rows_in_baseline=True)
CREDITS = {
    "grpo": Credit(),
    "ibpo-shaping": Credit("revisions", 3, "all", repair_bonus=0.3),
    "ibpo-mask": Credit("revisions", 3, "all", mask_failed=True),
    "ibpo-siblings": Credit("siblings", mask_failed=True),
    "ibpo": Credit(
        "revisions", 3, "all", repair_bonus=0.3, clamp_failed=True, mask_failed=True,
        revision_rows="plain", rows_in_baseline=True,
    ),  # the method, at full price
    "ibpo-lean": LEAN,  # ours, at a low price: one revised failure a group
    "repair-rows": ROWS,  # control: tells token credit from more good data
    "resample": dataclasses.replace(ROWS, reference_from="resample"),  # .. repair from more samples
    "shuffled": dataclasses.replace(LEAN, reference_from="other_problem"),  # .. comparing
}  # fmt: skip


def credit_of(config):
    """The Credit that a Config names, its switches applied.

    >>> credit_of(Config(credit="ibpo", switches="references=2,mask_solved=true")).references
    2
    """
    return with_switches(CREDITS[config.credit], config.switches)


def closest(trajectory, others):
    """The index in `others` with the smallest Levenshtein distance on ids, ties to the lowest."""
    distances = [Levenshtein.distance(trajectory.token_ids, o.token_ids) for o in others]
    return distances.index(min(distances))


def repairs_of(group):
    """The counterfactual of each revised failure: its own closest solved revision, by its index."""
    repairs = {}
    for i, y in enumerate(group.trajectories):
        if y.reward is None or y.solved:
            continue
        made = [r for r in group.revisions if r.of == i and r.trajectory.solved]
        made = [r for r in made if r.trajectory.token_ids != y.token_ids]
        if made:
            repairs[i] = made[closest(y, [r.trajectory for r in made])]
    return repairs


def credit_group(group, credit):
    """Equations (2) to (6) on one group.

    Returns (rows, counts): a CreditedRow for each scored trajectory, in order, then one for each
    revision row; counts for the metrics. A flat group (all shaped rewards equal) yields only zeros;
    `counts["flat"]` is then 1 and its rows take no part in the update.
    """
    samples = list(enumerate(group.trajectories)) + [(r.of, r.trajectory) for r in group.revisions]
    for i, y in samples:
        if y.reward is not None and not math.isfinite(y.reward):
            raise ValueError(f"sample {i} of {group.problem.prompt!r} has reward {y.reward}")
    ys = {i: y for i, y in enumerate(group.trajectories) if y.reward is not None}
    counts = Counter(unscored=sum(y.reward is None for _, y in samples))

    # (2), (3): shaping comes before centring.
    phi = dict.fromkeys(ys, 0.0)
    for i in (i for i, y in ys.items() if not y.solved):
        made = [r.trajectory for r in group.revisions if r.of == i]
        made = [y.solved for y in made if y.reward is not None]
        phi[i] = sum(made) / max(1, len(made))
    shaped = {i: y.reward + credit.repair_bonus * phi[i] for i, y in ys.items()}

    # Where each repair differs from its attempt: marks on the attempt, marks on the repair.
    repairs = repairs_of(group)
    changes = {i: differences(ys[i], revision.trajectory) for i, revision in repairs.items()}
    counts.update(rewrites=sum(is_rewrite(marks, credit) for marks, _ in changes.values()))
    in_rows = repairs if credit.revision_rows == "plain" else {}

    # (4): the baseline of a group, in which repairs may count.
    pool = list(shaped.values())
    if credit.rows_in_baseline:
        pool += [revision.trajectory.reward for revision in in_rows.values()]
    flat = not pool or max(pool) == min(pool)
    mean = sum(pool) / max(1, len(pool))
    std = math.sqrt(sum((r - mean) ** 2 for r in pool) / max(1, len(pool) - 1))

    def advantage(reward):
        return 0.0 if flat else (reward - mean) / (std + 1e-4)

    rows = []
    for i, y in ys.items():  # (5)
        a = advantage(shaped[i])
        if not y.solved:
            counts.update(failures=1, would_be_positive=a > 0)
            if credit.clamp_failed:
                a = min(a, 0.0)
        mask = credit_mask(i, ys, changes, credit, counts)
        advantages = [a * m for m in mask]
        rows.append(CreditedRow(group.prompt_ids, y.token_ids, y.logprobs, advantages))
    for i, revision in in_rows.items():  # (6)
        y = revision.trajectory
        a = advantage(y.reward)
        advantages = [a * (changed or credit.uniform_rows) for changed in changes[i][1]]
        rows.append(CreditedRow(group.prompt_ids, y.token_ids, revision.plain_logprobs, advantages))

    counts.update(group_counts(group, ys, phi, credit.repair_bonus))
    counts.update(groups=1, flat=flat, rows=len(rows), revision_rows=len(in_rows))
    return rows, counts


def group_counts(group, ys, phi, bonus):
    """What the metrics count of a group; `ys` and `phi`: its scored attempts and repair scores."""
    solved = sum(y.solved for y in ys.values())
    p, phis = solved / max(1, len(ys)), list(phi.values()) or [0.0]
    mean_phi = sum(phis) / len(phis)
    made = [(group.trajectories[r.of], r.trajectory) for r in group.revisions]
    return {
        "solved": solved,
        "all_wrong": solved == 0,
        "revisions": len(made),
        "revisions_solved": sum(yhat.solved for _, yhat in made),
        "revisions_same": sum(y.token_ids == yhat.token_ids for y, yhat in made),
        "revisions_unparsable": sum(not yhat.parsed for _, yhat in made),
        # Var(R + b phi) < Var(R) iff left < right (binary R, population moments of one prompt).
        "variance_left": bonus * sum((f - mean_phi) ** 2 for f in phis) / len(phis),
        "variance_right": 2 * p * mean_phi,
    }


def differences(y, other):
    """`changed_tokens` of two trajectories."""
    return changed_tokens(y.token_ids, other.token_ids, y.finished, other.finished)


def is_rewrite(mask, credit):
    """Whether a counterfactual changes too much of a text to say where its mistake is."""
    return sum(mask) > credit.max_edit_fraction * len(mask)


def credit_mask(i, ys, changes, credit, counts):
    """Which tokens of trajectory i are credited: (5).

    ys: the scored trajectories; changes: where repairs differ from their attempts. Both by index.
    """
    y, mask, others = ys[i], None, []
    if y.solved:
        others = [o for o in ys.values() if credit.mask_solved and not o.solved]
    elif credit.mask_failed and credit.counterfactuals in ("revisions", "both") and i in changes:
        mask = changes[i][0]
    elif credit.mask_failed and credit.counterfactuals in ("siblings", "both"):
        others = [o for o in ys.values() if o.solved]
    if others:
        mask = differences(y, others[closest(y, others)])[0]
        counts.update(rewrites=is_rewrite(mask, credit))
    if mask is None or is_rewrite(mask, credit):
        return [True] * len(y.token_ids)  # nothing to compare with: as in GRPO
    counts.update(masked=1, edited_fraction=sum(mask) / max(1, len(mask)))
    return mask


# ---- 4. The policy -------------------------------------------------------------------------------


class Policy:
    """A causal language model with its tokenizer: the tiny one, or any of Hugging Face's.

    Weights are float32. On a GPU products run in bfloat16 (autocast), and the old log-probabilities
    are then scored anew before the update: two batch shapes agree to 1e-5 only in float32.
    """

    def __init__(self, config, task):
        if config.model == "tiny":
            self.model, self.tokenizer = tiny_policy(task)
        else:
            path = Path(config.model)
            name, extra = config.model, {}
            if path.suffix == ".gguf":
                name, extra = str(path.parent), {"gguf_file": path.name}
            self.tokenizer = AutoTokenizer.from_pretrained(name, **extra)
            self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **extra)
            if extra:  # a .gguf file is dequantized as it is read; without its mark it can be saved
                self.model.hf_quantizer, self.model.config.quantization_config = None, None
                del self.model.config.quantization_config
        found = "cuda" if torch.cuda.is_available() else "cpu"
        found = "mps" if torch.backends.mps.is_available() else found
        tiny = getattr(self.model.config, "terse_prompts", False)
        auto = "cpu" if tiny else found  # 1M parameters are not worth the launches
        self.device = torch.device(auto if config.device == "auto" else config.device)
        self.bfloat16 = config.dtype == "bfloat16" or (
            config.dtype == "auto" and self.device.type == "cuda"
        )
        self.model.to(self.device).eval()  # eval: dropout stays off, in sampling and in the update
        task.words = not tiny
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.end_ids = sorted({*ends, self.tokenizer.eos_token_id} - {None})
        if not self.end_ids:
            raise ValueError(f"model {config.model!r} names no end token; allowed: at least one")
        # Masks are built from lengths, so padding may be any token, an end token too.
        pad = self.tokenizer.pad_token_id
        self.pad_id = self.end_ids[0] if pad is None else pad
        # transformers renamed the argument `past_key_values` to `cache` in 5.24.
        names = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.processed = 0  # tokens that went through the model, prompts and scoring passes too

    def save(self, folder):
        """Write model and tokenizer so that AutoModelForCausalLM, and --model, read them."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def encode(self, prompt):
        """A prompt's ids: in the chat template where the model has one."""
        if self.tokenizer.chat_template:
            prompt = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            return self.tokenizer.encode(prompt, add_special_tokens=False)
        return self.tokenizer.encode(prompt)

    def quotable(self, text):
        """`text` with special tokens broken up, so that it cannot end its own quotation."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def forward(self, ids, mask, positions, cache=None, last=False):
        """(logits_BTV float32, cache); `last`: logits of the last position only."""
        self.processed += int(mask[:, -ids.shape[1] :].sum())
        kwargs = {self.cache_name: cache, "logits_to_keep": 1 if last else 0}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            out = self.model(
                ids, attention_mask=mask, position_ids=positions, use_cache=True, **kwargs
            )
        return out.logits.float(), getattr(out, self.cache_name)

    def prefill(self, prompts):
        """Run prompts, left-padded, once: (logits_V of the next token, cache, mask, lengths)."""
        lengths = [len(p) for p in prompts]
        width = max(lengths)
        ids = torch.tensor([[self.pad_id] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
        ids, mask = ids.to(self.device), mask.to(self.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits, cache = self.forward(ids, mask, positions, last=True)
        return logits[:, -1], cache, mask, mask.sum(-1)


# ---- 5. Sampling ---------------------------------------------------------------------------------


@torch.no_grad()
def sample(policy, prompts, copies, limit, temperature, generator):
    """`copies` completions of each prompt, of at most `limit` tokens: a flat list of Trajectory.

    A prompt is prefilled once and its cache extended to its copies. temperature 0 is greedy. Ended
    rows are dropped as soon as a quarter of the batch has ended.
    """
    logits, cache, mask, position = policy.prefill(prompts)
    cache.batch_repeat_interleave(copies)
    logits, mask, position = (x.repeat_interleave(copies, 0) for x in (logits, mask, position))
    done = [Trajectory([], [], "", False) for _ in range(len(prompts) * copies)]
    rows = list(range(len(done)))  # which trajectory each row of the running batch is
    ends = torch.tensor(policy.end_ids, device=policy.device)
    for step in range(limit):
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        if temperature:
            tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
        else:
            tokens = logprobs.argmax(-1, keepdim=True)
        chosen = logprobs.gather(-1, tokens).squeeze(-1).tolist()
        ended = torch.isin(tokens.squeeze(-1), ends).tolist()
        alive = []
        for i, (row, token) in enumerate(zip(rows, tokens.squeeze(-1).tolist(), strict=True)):
            if not done[row].finished:
                done[row].token_ids.append(token)
                done[row].logprobs.append(chosen[i])
                done[row].finished = ended[i]
            if not done[row].finished:
                alive.append(i)
        if not alive or step == limit - 1:
            break
        if len(alive) <= 0.75 * len(rows):
            keep = torch.tensor(alive, device=policy.device)
            cache.batch_select_indices(keep)
            tokens, mask, position = tokens[keep], mask[keep], position[keep]
            rows = [rows[i] for i in alive]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], -1)
        logits, cache = policy.forward(tokens, mask, position[:, None], cache)
        logits, position = logits[:, -1], position + 1
    for y in done:
        y.text = policy.tokenizer.decode(y.token_ids[:-1] if y.finished else y.token_ids)
    return done


def rollout(policy, task, config, step, generator):
    """P problems with G scored attempts each; the problems are a pure function of (seed, step)."""
    first = step * config.problems_per_step
    problems = [task.problem(config.seed, first + i) for i in range(config.problems_per_step)]
    prompts = [policy.encode(task.prompt(problem)) for problem in problems]
    limit = config.max_new_tokens or task.max_tokens
    ys = sample(policy, prompts, config.group_size, limit, config.temperature, generator)
    groups = []
    for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
        group = Group(problem, prompt, ys[i * config.group_size : (i + 1) * config.group_size])
        for y in group.trajectories:
            score(task, problem, y)
        groups.append(group)
    return groups


def score(task, problem, trajectory):
    """Let the task's verifier judge a trajectory."""
    verdict = task.verify(problem, trajectory.text)
    trajectory.reward, trajectory.parsed = verdict.reward, verdict.parsed is not None


def revise(policy, task, groups, credit, config, rng, generator):
    """(1) Compare and correct: a step's revisions, sampled in one batch, go into `group.revisions`.

    References are siblings, solved ones first, in an order drawn by `rng`. The controls replace the
    sibling by an attempt at another problem, or the whole revision by a fresh sample from x.
    """
    jobs, prompts = [], []
    for group in groups:
        ys = group.trajectories
        failures = [i for i, y in enumerate(ys) if y.reward is not None and not y.solved]
        if credit.revised_failures_per_group != "all":
            rng.shuffle(failures)
            failures = sorted(failures[: credit.revised_failures_per_group])
        for i in failures:
            siblings = [y for j, y in enumerate(ys) if j != i and y.reward is not None]
            if credit.reference_from == "other_problem":
                siblings = [y for other in groups if other is not group for y in other.trajectories]
            elif credit.reference_from == "resample":
                siblings = []
            rng.shuffle(siblings)
            siblings.sort(key=lambda y: not y.solved)  # stable: the drawn order within each class
            for y in siblings[: credit.references - 1] or [None]:
                reference = None if y is None else policy.quotable(y.text)
                attempt = policy.quotable(ys[i].text)
                jobs.append((group, i, reference))
                prompts.append(
                    group.prompt_ids
                    if credit.reference_from == "resample"
                    else policy.encode(task.compare_prompt(group.problem, attempt, reference))
                )
    if not jobs:
        return
    limit = config.max_new_tokens or task.max_tokens
    ys = sample(policy, prompts, 1, limit, config.temperature, generator)
    for (group, i, reference), y in zip(jobs, ys, strict=True):
        score(task, group.problem, y)
        group.revisions.append(Revision(i, reference, y))
    if credit.revision_rows == "plain":  # pi_old(yhat | x) of those that become rows
        pairs = [(group, r) for group in groups for r in repairs_of(group).values()]
        texts = [(group.prompt_ids, r.trajectory.token_ids) for group, r in pairs]
        scored = old_logprobs(policy, texts, config)
        for (_, revision), logprobs in zip(pairs, scored, strict=True):
            revision.plain_logprobs = logprobs


# ---- 6. Log-probabilities, objective, update -----------------------------------------------------


def token_logprobs(policy, texts, temperature):
    """Log-probabilities (B, T) of completions, their entropies (B, T) and their mask (B, T).

    texts: B pairs (prompt_ids, token_ids). Equal prompts are run once and their cache, gradient
    included, is shared by their rows: a group of 8 costs one prompt, not 8.
    """
    unique = {tuple(prompt): None for prompt, _ in texts}
    index = {prompt: i for i, prompt in enumerate(unique)}
    which = torch.tensor([index[tuple(prompt)] for prompt, _ in texts], device=policy.device)
    lengths = torch.tensor([len(ids) for _, ids in texts], device=policy.device)
    width = int(lengths.max())
    ids = [ids + [policy.pad_id] * (width - len(ids)) for _, ids in texts]
    ids_BT = torch.tensor(ids, device=policy.device)
    steps_T = torch.arange(width, device=policy.device)
    mask_BT = steps_T < lengths[:, None]

    logits, cache, prompt_mask, prompt_lengths = policy.prefill([list(p) for p in unique])
    logits_BTV = logits[which][:, None]  # of the first token
    if width > 1:
        cache.batch_select_indices(which)
        mask = torch.cat([prompt_mask[which], mask_BT[:, :-1].long()], -1)
        positions = prompt_lengths[which][:, None] + steps_T[:-1]
        rest, _ = policy.forward(ids_BT[:, :-1], mask, positions, cache)
        logits_BTV = torch.cat([logits_BTV, rest], 1)
    logprobs_BTV = (logits_BTV / temperature).log_softmax(-1)
    entropy_BT = -(logprobs_BTV.detach().exp() * logprobs_BTV.detach()).sum(-1)
    return logprobs_BTV.gather(-1, ids_BT[..., None]).squeeze(-1), entropy_BT, mask_BT


def microbatches(texts, budget):
    """Lists of indices into `texts` whose padded completions hold at most `budget` tokens.

    Texts of similar length share a micro-batch, and within a length those of one prompt.
    """
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i][1]), texts[i][0]))
    batch = []
    for i in order:
        if batch and (len(batch) + 1) * len(texts[i][1]) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@torch.no_grad()
def old_logprobs(policy, texts, config):
    """The trainer's own log-probabilities of completions: a list of lists."""
    result = [None] * len(texts)
    for batch in microbatches(texts, config.microbatch_tokens):
        logprobs, _, _ = token_logprobs(policy, [texts[i] for i in batch], config.temperature)
        for i, row in zip(batch, logprobs.tolist(), strict=True):
            result[i] = row[: len(texts[i][1])]
    return result


@dataclass
class Batch:
    """A (micro-)batch of the loss: (B, T) tensors, and the counts that all of them divide by.

    tokens, rows: completion tokens and rows of the whole update, credited or not.
    """

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    token_ids: torch.Tensor
    group_B: torch.Tensor
    tokens: int
    rows: int


def clipped(ratio_BT, low, high, batch):
    """PPO's pessimistic minimum per token, and how often each clip binds (as sums)."""
    a = batch.advantages
    gain_BT = torch.minimum(ratio_BT * a, ratio_BT.clamp(low, high) * a)
    live = batch.mask & (a != 0)
    metrics = {
        "ratio/mean": (ratio_BT.detach() * batch.mask).sum().item() / batch.tokens,
        "clip_ratio/low_mean": (live & (ratio_BT < low) & (a < 0)).sum().item() / batch.tokens,
        "clip_ratio/high_mean": (live & (ratio_BT > high) & (a > 0)).sum().item() / batch.tokens,
    }
    return gain_BT * batch.mask, metrics


def dapo(logprobs_BT, batch, config):
    """Token ratios clipped to [clip_low, clip_high], global token mean: the default of (7).

    On the first update after sampling every ratio is 1, so the loss is -sum A_t / tokens whatever
    the policy; its gradient is that of -sum A_t log pi(y_t) / tokens.
    """
    log_ratio = torch.where(batch.mask, logprobs_BT - batch.old_logprobs, 0.0)  # before exp
    gain_BT, metrics = clipped(
        log_ratio.clamp(-20, 20).exp(), config.clip_low, config.clip_high, batch
    )
    return -gain_BT.sum() / batch.tokens, metrics


def gspo(logprobs_BT, batch, config):
    """GSPO in token form (2507.18071): ratio sg[s_i] pi / sg[pi], s_i = exp(mean_t log ratio).

    Its clip is GSPO's own, [1 - 3e-4, 1 + 4e-4]. The plain sequence ratio would average per-token
    advantages away; the token form has the same value and keeps them.
    """
    log_ratio = torch.where(batch.mask, logprobs_BT - batch.old_logprobs, 0.0)
    lengths_B1 = batch.mask.sum(-1, keepdim=True)
    sequence_B1 = (log_ratio.sum(-1, keepdim=True) / lengths_B1).clamp(-20, 20).exp().detach()
    own = torch.where(batch.mask, logprobs_BT - logprobs_BT.detach(), 0.0)
    gain_BT, metrics = clipped(sequence_B1 * own.exp(), 1 - 3e-4, 1 + 4e-4, batch)
    return -(gain_BT / lengths_B1).sum() / batch.rows, metrics


OBJECTIVES = {"dapo": dapo, "gspo": gspo}


def gradient(policy, groups, config):
    """Accumulate the gradient of one update. groups: whole groups, each a list of CreditedRow.

    Every micro-batch divides by the counts of the whole update, so their size changes no gradient.
    """
    rows = [(g, row) for g, group in enumerate(groups) for row in group]
    texts = [(row.prompt_ids, row.token_ids) for _, row in rows]
    tokens, metrics = sum(len(ids) for _, ids in texts), Counter()
    for indices in microbatches(texts, config.microbatch_tokens):
        chunk = [rows[i] for i in indices]
        logprobs_BT, entropy_BT, mask_BT = token_logprobs(
            policy, [texts[i] for i in indices], config.temperature
        )

        def padded(lists, like=logprobs_BT):
            width = like.shape[1]
            return like.new_tensor([list(x) + [0.0] * (width - len(x)) for x in lists])

        batch = Batch(
            old_logprobs=padded([row.old_logprobs for _, row in chunk]),
            advantages=padded([row.advantages for _, row in chunk]),
            mask=mask_BT,
            token_ids=padded([row.token_ids for _, row in chunk]).long(),
            group_B=torch.tensor([g for g, _ in chunk], device=policy.device),
            tokens=tokens,
            rows=len(rows),
        )
        loss, parts = OBJECTIVES[config.objective](logprobs_BT, batch, config)
        loss.backward()
        metrics.update(parts)
        metrics["loss"] += loss.item()
        metrics["entropy"] += (entropy_BT * mask_BT).sum().item() / tokens
    return metrics


def update(policy, optimizer, groups, config):
    """(7): one optimizer step for each mini-batch of whole groups. Returns the mean of the metrics.

    Groups are dealt out in turn; with fewer groups than mini-batches there are fewer updates.
    """
    parts = [groups[k :: config.minibatches] for k in range(config.minibatches)]
    parts, metrics = [part for part in parts if part], Counter()
    for part in parts:
        metrics.update(gradient(policy, part, config))
        parameters = policy.model.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        metrics["grad_norm"] += norm.item()
        optimizer.step()
        optimizer.zero_grad()
    return {"updates": len(parts)} | {name: value / len(parts) for name, value in metrics.items()}


# ---- 7. Evaluation -------------------------------------------------------------------------------


def evaluate(policy, task, config, split, count):
    """Greedy and sampled accuracy on `count` problems of a split, with 95% Wilson intervals.

    Problems and sampling are the same whatever the run's seed. None when `count` is 0.
    """
    if not count:
        return None
    result = {"problems": count}
    limit = config.max_new_tokens or task.max_tokens
    problems = [task.problem(0, index, split) for index in range(count)]
    for name, temperature in (("greedy", 0.0), ("sampled", config.temperature)):
        generator = torch.Generator(policy.device).manual_seed(0)
        solved = 0
        for start in range(0, count, 128):
            chunk = problems[start : start + 128]
            prompts = [policy.encode(task.prompt(problem)) for problem in chunk]
            ys = sample(policy, prompts, 1, limit, temperature, generator)
            for problem, y in zip(chunk, ys, strict=True):
                score(task, problem, y)
                solved += y.solved
        result[name] = solved / count
        result[f"{name}_interval"] = wilson(solved, count)
    return result


# ---- 8. The training loop ------------------------------------------------------------------------


def train_step(policy, optimizer, task, credit, config, step):
    """Sample, compare and correct, credit, update: (metrics row, groups, rows of each group)."""
    # Everything random in a step follows from (seed, step).
    rng = random.Random(f"{config.seed}/{step}")
    generator = torch.Generator(policy.device).manual_seed(rng.randrange(2**62))
    clock, seconds, processed = time.perf_counter(), {}, policy.processed

    def lap(name):
        nonlocal clock
        now = time.perf_counter()
        seconds[f"seconds/{name}"], clock = now - clock, now

    groups = rollout(policy, task, config, step, generator)
    lap("sample")
    if credit.references:
        revise(policy, task, groups, credit, config, rng, generator)
    lap("revise")
    if policy.bfloat16:
        ys = [(group.prompt_ids, y) for group in groups for y in group.trajectories]
        scored = old_logprobs(policy, [(prompt, y.token_ids) for prompt, y in ys], config)
        for (_, y), logprobs in zip(ys, scored, strict=True):
            y.logprobs = logprobs
    lap("score")
    credited, counts = zip(*(credit(group) for group in groups), strict=True)
    lap("credit")
    live = [rows for rows, count in zip(credited, counts, strict=True) if not count["flat"]]
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup))
    learned = update(policy, optimizer, live, config)  # every group flat: no weight changes
    lap("update")
    row = {"step": step + 1, **step_metrics(groups, counts, len(live)), **learned, **seconds}
    return row | {"tokens/processed": policy.processed - processed}, groups, credited


def step_metrics(groups, counts, live):
    """The metrics of a step that need no model; the README defines each by its formula."""
    total = sum(counts, Counter())
    ys = [y for group in groups for y in group.trajectories]
    revisions = [r.trajectory for group in groups for r in group.revisions]
    rewards = [[y.reward for y in g.trajectories if y.reward is not None] for g in groups]
    spread = [torch.tensor(r).std().item() for r in rewards if len(r) > 1]
    lengths = [len(y.token_ids) for y in ys]

    def share(part, whole):
        return total[part] / total[whole] if total[whole] else 0.0

    return {
        "reward/mean": sum(map(sum, rewards)) / max(1, sum(map(len, rewards))),
        "reward/std": sum(spread) / max(1, len(spread)),
        "solved": total["solved"] / len(ys),
        "unscored": total["unscored"],
        "frac_reward_zero_std": 1 - live / len(groups),
        "groups/all_wrong": share("all_wrong", "groups"),
        "revisions/made": total["revisions"],
        "revisions/solved": share("revisions_solved", "revisions"),
        "revisions/unparsable": share("revisions_unparsable", "revisions"),
        "revisions/same": share("revisions_same", "revisions"),
        "revisions/rows": total["revision_rows"],
        "rewrites": total["rewrites"],
        "edited_fraction": share("edited_fraction", "masked"),
        "would_be_positive": share("would_be_positive", "failures"),
        "variance/left": total["variance_left"] / len(groups),
        "variance/right": total["variance_right"] / len(groups),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/clipped_ratio": sum(not y.finished for y in ys) / len(ys),
        "tokens/sampled": sum(lengths),
        "tokens/revision": sum(len(y.token_ids) for y in revisions),
    }


def train(config, stop, label):
    """One run: metrics.jsonl and final/ in config.output_dir; returns the summary."""
    folder = Path(config.output_dir)
    task, credit = make_task(config.task, config.difficulty), credit_of(config)
    torch.manual_seed(config.seed)
    policy = Policy(config, task)
    optimizer = torch.optim.AdamW(policy.model.parameters(), config.learning_rate, weight_decay=0.0)
    stop.listen()
    started = time.perf_counter()
    before = evaluate(policy, task, config, "test", config.test_problems)
    history, story = [], None
    with open(folder / "metrics.jsonl", "w") as log:

        def record(row):
            if config.eval_every and row["step"] % config.eval_every == 0:
                clock = time.perf_counter()
                found = evaluate(policy, task, config, "validation", config.validation_problems)
                row |= {f"validation/{name}": found[name] for name in ("sampled", "greedy")}
                row["seconds/evaluate"] = time.perf_counter() - clock
            history.append(row)
            log.write(json.dumps(row) + "\n")
            log.flush()

        record({"step": 0})
        accuracy = before["sampled"] if before else 0.0
        bar = tqdm(range(config.steps), label, unit="step")
        for step in bar:
            if stop.asked:
                break
            row, groups, credited = train_step(policy, optimizer, task, credit, config, step)
            story = story or story_of(groups, credited, repairs_of, policy.tokenizer.decode)
            record(row)
            if not row["updates"]:
                bar.write(f"step {step + 1}: every group is flat, no weight was changed")
            accuracy = row.get("validation/sampled", accuracy)
            bar.set_postfix(reward=f"{row['reward/mean']:.2f}", accuracy=f"{accuracy:.2f}")
    policy.save(folder / "final")
    return {
        "task": config.task,
        "difficulty": task.difficulty,
        "credit": config.credit,
        "seed": config.seed,
        "steps": len(history) - 1,
        "stopped": stop.asked,
        "accuracy_before": before,
        "accuracy_after": evaluate(policy, task, config, "test", config.test_problems),
        "sampled_tokens": sum(row.get("tokens/sampled", 0) for row in history),
        "revision_tokens": sum(row.get("tokens/revision", 0) for row in history),
        "processed_tokens": sum(row.get("tokens/processed", 0) for row in history),
        "seconds": time.perf_counter() - started,
        "story": story,
    }


# ---- 9. Command line -----------------------------------------------------------------------------


def main(arguments=None):
    config, credits, seeds = parse_arguments(Config, __doc__, arguments)
    stop = Stop()
    try:
        for credit in credits:
            dataclasses.replace(config, credit=credit).check()
        runs = [
            dataclasses.replace(config, credit=credit, seed=seed)
            for seed in seeds
            for credit in credits
        ]
        summaries = run_all(runs, config.output_dir, train, stop)
    except (OSError, ValueError) as error:
        sys.exit(f"ibpo_minimal: {error}")
    except KeyboardInterrupt:
        sys.exit("ibpo_minimal: interrupted; the run in progress is not saved")
    show(summaries, config.output_dir)
    sys.exit(130 if stop.asked else 0)


if __name__ == "__main__":
    main()
