"""Seconds a GRPO step takes here and in TRL's GRPOTrainer, in turn, on the same policy and work.

    pip install trl==1.16.0
    python tests/bench_trl.py

16 prompts x 8 samples of carry_chain, 2 updates a rollout in both, float32 on the CPU. The figure
to quote is the ratio of the medians; the machine's own speed cancels in it.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import ibpo_minimal as ibpo  # noqa: E402

STEPS, ROUNDS = 8, 3


def ours():
    """Seconds of each step of ibpo_minimal with --credit grpo."""
    config = ibpo.Config(credit="grpo", learning_rate=1e-6)
    task = ibpo.make_task(config.task)
    policy = ibpo.Policy(config, task)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.learning_rate)
    seconds = []
    for step in range(STEPS):
        start = time.perf_counter()
        ibpo.train_step(policy, optimizer, task, ibpo.CREDITS["grpo"], config, step)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]  # the first warms up


def theirs():
    """Seconds of each of TRL's steps: one rollout and as many updates."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = ibpo.Config()
    task = ibpo.make_task(config.task)
    policy = ibpo.Policy(config, task)
    problems = {p.prompt + "\n": p for p in (task.problem(0, i) for i in range(16 * STEPS))}

    def reward(prompts, completions, **_):
        pairs = zip(prompts, completions, strict=True)
        return [task.verify(problems[prompt], text).reward for prompt, text in pairs]

    updates, seconds = config.minibatches, []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step % updates == 0:
                self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % updates == 0:
                seconds.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
            per_device_train_batch_size=128 // updates, steps_per_generation=updates,
            num_generations=8, max_completion_length=task.max_tokens, max_steps=STEPS * updates,
            learning_rate=1e-6, beta=0.0, temperature=1.0, top_k=0, top_p=1.0, logging_steps=1000,
            disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=policy.model.train(),
            processing_class=policy.tokenizer,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": list(problems)}),
            callbacks=[Clock()],
        )
        trainer.train()
    return seconds[1:]


def main():
    ratios = []
    for turn in range(ROUNDS):
        a, b = statistics.median(ours()), statistics.median(theirs())
        ratios.append(a / b)
        print(f"round {turn + 1}: ours {a:.3f} s, TRL {b:.3f} s, ratio {a / b:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
