"""The tiny policy: a small Qwen3 over characters, warm-started on sloppy demonstrations.

A warm start stands in for pretraining. It imitates a student who solves problems carelessly and
corrects attempts better than he writes them, because he compares (`carry_chain.py`). IBPO lives on
that gap; here it is taught, and the README says so. `python -m toy_tasks.policy` measures it.

One policy serves a range of difficulties of its task. Those of carry_chain and worksheet ship with
the project; others are trained on first use and kept in the user's cache folder.
"""

import argparse
import hashlib
import json
import math
import random
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import tokenizers
import torch
import torch.nn.functional as F
from rapidfuzz.distance import Levenshtein
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from . import make_task
from .report import markdown_table, wilson

SHIPPED = Path(__file__).parent / "policies"
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # newline and printable ASCII


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes a warm start, next to the task itself."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    mlp: int = 256
    steps: int = 2000
    batch: int = 48  # demonstrations an update
    revisions: float = 0.6  # share of them that correct an attempt, from a third of it at the start
    quoted: float = 0.5  # weight in the loss of the texts that a compare prompt quotes
    learning_rate: float = 2e-3  # of AdamW, on embeddings and norms
    matrix_learning_rate: float = 0.03  # of Muon, on the matrices
    seed: int = 0


def tiny_tokenizer():
    """One token a character, as a transformers fast tokenizer.

    >>> tokenizer = tiny_tokenizer()
    >>> ids = tokenizer.encode("47+38\\n") + [tokenizer.eos_token_id]
    >>> len(ids), tokenizer.decode(ids)
    (7, '47+38\\n<end>')
    """
    vocabulary = {token: i for i, token in enumerate((PAD, END, UNKNOWN, *ALPHABET))}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    each_character = tokenizers.Regex(r"[\s\S]")
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(each_character, "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(recipe, tokenizer):
    """The Qwen3 of `recipe`, randomly initialised from its seed."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        head_dim=recipe.hidden // recipe.heads,
        intermediate_size=recipe.mlp,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        terse_prompts=True,  # ours: travels with the weights, so that a saved folder is recognised
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


# ---- demonstrations ------------------------------------------------------------------------------


def demonstration(task, index, revisions=0.5):
    """Demonstration number `index`: (prompt, completion), a pure function of its arguments.

    A revision shows the student a failed attempt beside a solved one (45%), another failed one
    (25%), a right solution of another problem (20%), or nothing (10%).
    """
    rng = random.Random(f"demonstration/{task.name}/{task.difficulty}/{index}")
    problem = task.problem(-1, index)
    if rng.random() >= revisions:
        return task.prompt(problem), task.demonstrate(problem, rng)
    attempt = task.demonstrate(problem, rng)
    while task.verify(problem, attempt).reward == 1.0:  # some problems are too easy to fail
        problem = task.problem(-1, rng.randrange(2**40))
        attempt = task.demonstrate(problem, rng)
    kind, reference = rng.random(), None
    if kind < 0.45:
        reference = task.demonstrate(problem, rng, careful=True)
    elif kind < 0.7:
        reference = task.demonstrate(problem, rng)
        while task.verify(problem, reference).reward == 1.0:
            reference = task.demonstrate(problem, rng)
    elif kind < 0.9:
        other = task.problem(-1, rng.randrange(2**40))
        reference = task.demonstrate(other, rng, careful=True)
    revision = task.demonstrate_revision(problem, attempt, reference, rng)
    return task.compare_prompt(problem, attempt, reference), revision


def mix(task):
    """The tasks of one policy: `task` at each of the difficulties that it mixes."""
    difficulties = task.mix if task.difficulty in task.mix else (task.difficulty,)
    return [make_task(task.name, difficulty) for difficulty in difficulties]


def fingerprint(task, recipe):
    """A short hash of all that shapes a warm start: the recipe and what the student writes."""
    shown = [demonstration(each, index) for each in mix(task) for index in range(50)]
    text = json.dumps([asdict(recipe), shown, ALPHABET])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- warm start ----------------------------------------------------------------------------------


def warm_start(task, recipe, quiet=False):
    """Train the tiny policy to imitate the student of `task`; returns (model, tokenizer)."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(recipe, tokenizer)
    # Muon for the matrices, AdamW for embeddings and norms: with AdamW alone addition took more
    # than twice as many updates to appear.
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: learning_rate_at(step, recipe.steps))
        for each in optimizers
    ]
    tasks, rng = mix(task), random.Random(recipe.seed)
    bar = tqdm(range(recipe.steps), f"warm start ({task.name})", unit="update", disable=quiet)
    for step in bar:
        done = step / recipe.steps
        # Small problems first, and few revisions: one must be able to add before one can compare.
        known = tasks[: 1 + int(len(tasks) * done / 0.4)]
        revisions = recipe.revisions * min(1.0, 1 / 3 + done / 0.75)
        rows = []
        for index in range(step * recipe.batch, (step + 1) * recipe.batch):
            prompt, completion = demonstration(rng.choice(known), index, revisions)
            ids = tokenizer.encode(completion) + [tokenizer.eos_token_id]
            # What a compare prompt quotes was written by the student too: learnt from, with less
            # weight. It is where the policy learns to see how careful a reference is.
            quoted = prompt.partition("|")[2]
            rows.append((tokenizer.encode(prompt), len(quoted), ids))
        loss = imitate(model, rows, recipe.quoted)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return model.eval(), tokenizer


def learning_rate_at(step, steps):
    """The share of the full learning rate: 50 updates of warm-up, then a cosine down to a tenth."""
    return min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def imitate(model, rows, quoted_weight, micro_batch=16):
    """Backward pass of a batch's mean cross-entropy, which is returned.

    rows: (prompt ids, how many of the prompt's last tokens are quotation, completion ids). The
    completion has weight 1, quotations `quoted_weight`, the rest of the prompt 0.
    """
    rows = sorted(rows, key=lambda row: len(row[0]) + len(row[2]))  # little padding
    weight = sum(quoted_weight * quoted + len(completion) for _, quoted, completion in rows)
    total = 0.0
    for start in range(0, len(rows), micro_batch):
        chunk = rows[start : start + micro_batch]
        width = max(len(prompt) + len(completion) for prompt, _, completion in chunk)
        ids_BT = torch.zeros(len(chunk), width, dtype=torch.long)
        weights_BT = torch.zeros(len(chunk), width)
        for i, (prompt, quoted, completion) in enumerate(chunk):
            end = len(prompt) + len(completion)
            ids_BT[i, :end] = torch.tensor(prompt + completion)
            weights_BT[i, len(prompt) - quoted : len(prompt)] = quoted_weight
            weights_BT[i, len(prompt) : end] = 1.0
        # Right padding needs no attention mask: nothing before it can attend to it.
        logits_BTV = model(ids_BT, use_cache=False).logits[:, :-1]
        targets = ids_BT[:, 1:].flatten()
        losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="none")
        loss = (losses * weights_BT[:, 1:].flatten()).sum() / weight
        loss.backward()
        total += loss.item()
    return total


# ---- shipped, cached, or trained now -------------------------------------------------------------


def tiny_policy(task, recipe=Recipe(), quiet=False):
    """(model, tokenizer) of the warm-started tiny policy for `task`.

    Shipped with the project, else from the user's cache folder, else trained now and cached. A
    damaged copy is rebuilt with one line said.
    """
    if not task.demonstrated:
        raise ValueError(f"task {task.name!r} has no student to imitate; give a model with --model")
    key = fingerprint(task, recipe)
    cached = Path(platformdirs.user_cache_dir("ibpo")) / f"{task.name}-{key}"
    for folder in (SHIPPED / task.name, cached):
        if not folder.exists():
            continue
        try:
            return load(folder, key)
        except StaleError:
            continue
        except Exception as error:  # whatever a damaged file provokes: the copy can be made again
            print(f"{folder} is damaged ({error}); building it again", file=sys.stderr)
    model, tokenizer = warm_start(task, recipe, quiet)
    try:
        save(model, tokenizer, key, cached)
    except OSError as error:
        print(f"the warm start could not be kept in {cached}: {error}", file=sys.stderr)
    return model, tokenizer


class StaleError(Exception):
    """A stored policy that was trained on other demonstrations or by another recipe."""


def save(model, tokenizer, key, folder):
    """Write a policy into `folder` in one step: other readers see all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        new = Path(parent) / "new"
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        digest = hashlib.sha256((new / "model.safetensors").read_bytes()).hexdigest()
        (new / "warm_start.json").write_text(json.dumps({"key": key, "sha256": digest}) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


def load(folder, key):
    """(model, tokenizer) stored in `folder`; StaleError when made for another key."""
    stored = json.loads((folder / "warm_start.json").read_text())
    if stored["key"] != key:
        raise StaleError(stored["key"])
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if digest != stored["sha256"]:
        raise ValueError("its weights have another checksum than they were saved with")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


# ---- how well the policy corrects ----------------------------------------------------------------


@torch.no_grad()
def write_texts(model, tokenizer, prompts, limit):
    """One sampled completion (temperature 1) of each prompt."""
    texts = []
    for start in range(0, len(prompts), 128):
        batch = tokenizer(
            prompts[start : start + 128],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        out = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=limit)
        texts += tokenizer.batch_decode(
            out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return texts


def operator_rates(task, model, tokenizer, problems=256, seed=0):
    """How often a failed attempt is repaired, by what it is compared with.

    Attempts are drawn until `problems` validation problems have two failures and a solved one
    among 8 samples; every rate is over the first failures of these same problems. Returns a dict:
    reference -> (repairs solved, attempts, mean edit distance of solved repairs from attempts).
    "fresh" is a new sample in place of a repair; "alone" a repair without a reference.
    """
    chosen, index = [], 0
    while len(chosen) < problems and index < 50 * problems:
        asked = [task.problem(seed, i, "validation") for i in range(index, index + 64)]
        index += len(asked)
        prompts = [task.prompt(problem) for problem in asked for _ in range(8)]
        texts = write_texts(model, tokenizer, prompts, task.max_tokens)
        for n, problem in enumerate(asked):
            group = texts[8 * n : 8 * n + 8]
            solved = [t for t in group if task.verify(problem, t).reward == 1.0]
            failed = [t for t in group if t not in solved]
            if solved and len(set(failed)) > 1:
                other = next(text for text in failed if text != failed[0])
                chosen.append((problem, failed[0], solved[0], other))
    chosen = chosen[:problems]
    elsewhere = [solved for _, _, solved, _ in chosen[1:] + chosen[:1]]
    kinds = {
        "solved": [(p, task.compare_prompt(p, a, s)) for p, a, s, _ in chosen],
        "failed": [(p, task.compare_prompt(p, a, f)) for p, a, _, f in chosen],
        "other problem": [
            (p, task.compare_prompt(p, a, other))
            for (p, a, _, _), other in zip(chosen, elsewhere, strict=True)
        ],
        "alone": [(p, task.compare_prompt(p, a)) for p, a, _, _ in chosen],
        "fresh": [(p, task.prompt(p)) for p, _, _, _ in chosen],
    }
    rates = {}
    for kind, asked in kinds.items():
        texts = write_texts(model, tokenizer, [prompt for _, prompt in asked], task.max_tokens)
        distances = [
            Levenshtein.distance(attempt, text)
            for (problem, attempt, _, _), text in zip(chosen, texts, strict=True)
            if task.verify(problem, text).reward == 1.0
        ]
        mean = sum(distances) / max(1, len(distances))
        rates[kind] = (len(distances), len(texts), mean)
    return rates


def rates_table(rates):
    """The rates as a Markdown table, with 95% Wilson intervals."""
    rows = []
    for kind, (solved, count, distance) in rates.items():
        low, high = wilson(solved, count)
        rows.append(
            [kind, f"{solved / max(1, count):.2f} [{low:.2f}, {high:.2f}]", f"{distance:.1f}"]
        )
    return markdown_table(["compared with", "solved", "edits from the attempt"], rows)


def main():
    parser = argparse.ArgumentParser(description="Measure, or make, a task's warm-started policy.")
    parser.add_argument("--task", default="carry_chain", help="(default: carry_chain)")
    parser.add_argument("--difficulty", type=int, help="default: the task's own")
    parser.add_argument("--problems", type=int, default=256, help="(default: 256)")
    parser.add_argument("--ship", action="store_true", help="train it and keep it in the project")
    given = parser.parse_args()
    try:
        task = make_task(given.task, given.difficulty)
    except ValueError as error:
        parser.error(str(error))
    if given.ship:
        recipe = Recipe()
        model, tokenizer = warm_start(task, recipe)
        save(model, tokenizer, fingerprint(task, recipe), SHIPPED / task.name)
    torch.manual_seed(0)
    model, tokenizer = tiny_policy(task)
    rates = operator_rates(task, model, tokenizer, given.problems)
    attempts = rates["fresh"][1]
    print(f"{task.name}, difficulty {task.difficulty}: {attempts} failed attempts")
    print(rates_table(rates))


if __name__ == "__main__":
    main()
