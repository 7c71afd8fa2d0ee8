"""Direct preference optimisation (DPO) with a loss of one's own: a tiny random model learns to prefer calm answers.

    make install
    .venv/bin/python examples/dpo.py

An ordinary Tinker script; only its import line differs. It starts a server of its own; to use another one, set
TOGETHER_POST_TRAINING_ADDRESS=grpc://host:port.
"""

import argparse
import random
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

import together.post_training.tinker as tinker

QUESTIONS = [
    "Are you there?",
    "Can you help me?",
    "How are you?",
    "Is it late?",
    "Is the door open?",
    "Shall we go?",
    "Was it good?",
    "Where is my hat?",
    "Who is that?",
    "Will it rain?",
]
ANSWERS = [
    "all is well",
    "give me a moment",
    "i think so",
    "let me see",
    "maybe tomorrow",
    "no, not today",
    "of course",
    "thank you for asking",
    "that is fine",
    "yes, gladly",
]


def build_pairs(rng: random.Random, num_pairs: int) -> list[tuple[str, str, str]]:
    """(question, chosen answer, rejected answer): the same words, calm or shouted."""
    pairs = [(q, a, a.upper() + "!") for q in QUESTIONS for a in ANSWERS]
    return rng.sample(pairs, num_pairs)


def build_datum(tokenizer, question: str, answer: str) -> tinker.Datum:
    """Position i reads tokens[i] and predicts tokens[i + 1]; the weights mark the answer."""
    prompt = tokenizer.encode(question + "\n", add_special_tokens=False)
    completion = tokenizer.encode(answer, add_special_tokens=False)
    tokens = prompt + completion
    weights = [0.0] * len(prompt) + [1.0] * len(completion)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64"),
            "weights": tinker.TensorData(data=weights[1:], dtype="float32"),
        },
    )


def answer_logprob(datum: tinker.Datum, logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs * datum.loss_fn_inputs["weights"].to_torch()).sum()


def compute_reference(training, data: list[tinker.Datum]) -> torch.Tensor:
    """Each answer's log-probability before any training: a fresh adapter is the base model exactly."""
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    logprobs = [output["logprobs"].to_torch() for output in outputs]
    return torch.stack([answer_logprob(*pair) for pair in zip(data, logprobs, strict=True)])


def margins(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """By how much more than the reference the policy favours the chosen answer; data is chosen, rejected, ..."""
    gain = policy - reference
    return gain[0::2] - gain[1::2]


def accuracy(margin: torch.Tensor) -> float:
    """Share of the pairs that are ranked right; a tie counts half."""
    return ((margin > 0).float() + 0.5 * (margin == 0).float()).mean().item()


def save_plot(losses: list[float], accuracies: list[float], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, label="loss per pair (nats)")
    axes.plot(accuracies, label="preference accuracy of the batch")
    axes.set(title="DPO", xlabel="step", ylim=(0, 1.05))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="DPO through forward_backward_custom.")
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-pairs", type=int, default=48)
    parser.add_argument("--num-held-out", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
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
    rng = random.Random(args.seed)
    data = [
        build_datum(tokenizer, question, answer)
        for question, chosen, rejected in build_pairs(rng, args.num_pairs + args.num_held_out)
        for answer in (chosen, rejected)
    ]
    reference = compute_reference(training, data)
    train, held_out = data[: 2 * args.num_pairs], data[2 * args.num_pairs :]

    losses, accuracies = [], []
    progress = tqdm(range(args.steps), desc="DPO")
    for _ in progress:
        rows = [
            row
            for pair in rng.sample(range(args.num_pairs), args.batch_size)
            for row in (2 * pair, 2 * pair + 1)
        ]

        def dpo_loss(batch, logprobs, rows=rows):
            """-sum log sigmoid(beta * margin): Rafailov et al. 2023, arXiv:2305.18290, equation 7."""
            policy = torch.stack([answer_logprob(*p) for p in zip(batch, logprobs, strict=True)])
            margin = margins(policy, reference[rows])
            loss = -torch.nn.functional.logsigmoid(args.beta * margin).sum()
            return loss, {"accuracy": accuracy(margin.detach())}

        backward = training.forward_backward_custom([train[row] for row in rows], dpo_loss)
        update = training.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
        metrics = backward.result().metrics
        update.result()
        losses.append(metrics["loss:sum"] / args.batch_size)
        accuracies.append(metrics["accuracy"])
        progress.set_postfix(loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1]:.2f}")

    policy = compute_reference(training, held_out)
    held_out_accuracy = accuracy(margins(policy, reference[2 * args.num_pairs :]))
    checkpoint = training.save_state("dpo").result()
    picture = args.output / "dpo.png"
    save_plot(losses, accuracies, picture)

    lines = [f"DPO of {args.model}, {args.steps} steps:"]
    lines += [f"  loss per pair    {losses[0]:.3f} -> {losses[-1]:.3f}"]
    lines += [
        f"  accuracy         {accuracies[0]:.2f} -> {held_out_accuracy:.2f} (pairs it never saw)"
    ]
    lines += [f"  checkpoint       {checkpoint.path}", f"  picture          {picture.resolve()}"]
    summary = "\n".join(lines)
    (args.output / "dpo.txt").write_text(summary + "\n")
    print(summary)


if __name__ == "__main__":
    main()
