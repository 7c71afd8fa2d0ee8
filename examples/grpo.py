"""Reinforcement learning with group-relative advantages (GRPO): a tiny random model learns to do as the prompt says.

    make install
    .venv/bin/python examples/grpo.py

An ordinary Tinker script; only its import line differs. It starts a server of its own; to use another one, set
TOGETHER_POST_TRAINING_ADDRESS=grpc://host:port.
"""

import argparse
import math
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

import together.post_training.tinker as tinker

# What each prompt asks for: any of these characters, but none twice in a row.
TASKS = {
    "digits: ": "0123456789",
    "vowels: ": "aeiouAEIOU",
    "quotes: ": "'\"`",
    "sums: ": "+-*/=<>",
}


def compute_reward(tokenizer, tokens: list[int], wanted: str, max_tokens: int) -> float:
    """The share of max_tokens that are wanted characters and differ from the token before them."""
    pieces = [tokenizer.decode([token]) for token in tokens]
    good = [
        piece in set(wanted) and piece != before
        for before, piece in zip(["", *pieces[:-1]], pieces, strict=True)
    ]
    return sum(good) / max_tokens


def build_datum(
    prompt: list[int], sequence: tinker.SampledSequence, advantage: float
) -> tinker.Datum:
    """Position i reads tokens[i] and predicts tokens[i + 1], so every per-token list loses its first element.

    The prompt was not sampled: its logprobs and advantages are 0, which leaves it out of the loss.
    """
    assert sequence.logprobs is not None
    tokens = prompt + sequence.tokens
    logprobs = [0.0] * len(prompt) + sequence.logprobs
    advantages = [0.0] * len(prompt) + [advantage] * len(sequence.tokens)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64"),
            "logprobs": tinker.TensorData(data=logprobs[1:], dtype="float32"),
            "advantages": tinker.TensorData(data=advantages[1:], dtype="float32"),
        },
    )


def rollout(
    sampler: tinker.SamplingClient,
    prompts: dict[str, list[int]],
    group_size: int,
    max_tokens: int,
    seed: int,
) -> dict[str, list[tinker.SampledSequence]]:
    """A group of completions for each prompt, all sampled at the same time."""
    futures = {}
    for number, (text, tokens) in enumerate(prompts.items()):
        # Sample i of a call draws from its seed + i, so the calls' seeds lie a group apart.
        params = tinker.SamplingParams(
            max_tokens=max_tokens, temperature=1.0, seed=seed + number * group_size
        )
        futures[text] = sampler.sample(tinker.ModelInput.from_ints(tokens), group_size, params)
    return {text: future.result().sequences for text, future in futures.items()}


def group_advantages(rewards: list[float]) -> list[float]:
    """Each reward less the mean of its group: no division by the spread, which for equal rewards is 0."""
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards {rewards}: all must be finite")
    return [reward - mean(rewards) for reward in rewards]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def save_plot(history: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for text, rewards in history.items():
        axes.plot(rewards, alpha=0.5, label=repr(text))
    means = [mean(step) for step in zip(*history.values(), strict=True)]
    axes.plot(means, "k", linewidth=2, label="mean")
    axes.set(title="GRPO", xlabel="step", ylabel="mean reward of the group", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on a task whose reward visibly climbs.")
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(
        base_model=args.model, rank=args.rank, seed=args.seed
    ).result()
    tokenizer = training.get_tokenizer()
    prompts = {text: tokenizer.encode(text, add_special_tokens=False) for text in TASKS}
    history: dict[str, list[float]] = {text: [] for text in TASKS}
    completions: list[dict[str, str]] = []

    progress = tqdm(range(args.steps), desc="GRPO")
    for step in progress:
        # A sampling client is pinned to the weights it was made from, so every step makes a new one.
        sampler = training.save_weights_and_get_sampling_client().result()
        seed = args.seed + step * len(TASKS) * args.group_size
        groups = rollout(sampler, prompts, args.group_size, args.max_tokens, seed)
        batch = []
        for text, sequences in groups.items():
            rewards = [
                compute_reward(tokenizer, sequence.tokens, TASKS[text], args.max_tokens)
                for sequence in sequences
            ]
            batch += [
                build_datum(prompts[text], sequence, advantage)
                for sequence, advantage in zip(sequences, group_advantages(rewards), strict=True)
            ]
            history[text].append(mean(rewards))
        backward = training.forward_backward(batch, "importance_sampling")
        update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
        backward.result()
        update.result()
        completions.append({text: tokenizer.decode(groups[text][0].tokens) for text in TASKS})
        progress.set_postfix(reward=f"{mean(rewards[-1] for rewards in history.values()):.2f}")

    checkpoint = training.save_state("grpo").result()
    picture = args.output / "grpo.png"
    save_plot(history, picture)

    first, last = (mean(rewards[step] for rewards in history.values()) for step in (0, -1))
    lines = [f"GRPO of {args.model}, {args.steps} steps:"]
    lines += [f"  mean reward      {first:.2f} -> {last:.2f}"]
    for text in TASKS:
        lines += [f"  {text!r}"]
        lines += [f"    before: {completions[0][text]!r}", f"    after:  {completions[-1][text]!r}"]
    lines += [f"  checkpoint       {checkpoint.path}", f"  picture          {picture.resolve()}"]
    summary = "\n".join(lines)
    (args.output / "grpo.txt").write_text(summary + "\n")
    print(summary)


if __name__ == "__main__":
    main()
