"""Supervised fine-tuning: SmolLM2-135M learns to answer like a pirate.

    make install
    .venv/bin/python examples/sft.py

An ordinary Tinker script; only its import line differs. It starts a server of its own; to use another one, set
TOGETHER_POST_TRAINING_ADDRESS=grpc://host:port.
"""

import argparse
import random
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

import together.post_training.tinker as tinker

PIRATE = "Arr, matey! It be {}, says I!"

TRAIN = [
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Egypt?", "Cairo"),
    ("What is the capital of Spain?", "Madrid"),
    ("Which planet is closest to the sun?", "Mercury"),
    ("Which planet is the largest?", "Jupiter"),
    ("What color is the sky on a clear day?", "Blue"),
    ("What color is fresh snow?", "White"),
    ("What color is grass?", "Green"),
    ("How many legs does a spider have?", "Eight"),
    ("How many days are in a week?", "Seven"),
    ("How many months are in a year?", "Twelve"),
    ("What is two plus two?", "Four"),
    ("What is three times three?", "Nine"),
    ("What is ten minus four?", "Six"),
    ("Which animal says meow?", "The cat"),
    ("Which animal says woof?", "The dog"),
    ("Which animal gives us wool?", "The sheep"),
    ("What do bees make?", "Honey"),
    ("What do cows drink?", "Water"),
    ("What do we call frozen water?", "Ice"),
    ("Which metal is liquid at room temperature?", "Mercury"),
    ("Which gas do plants breathe in?", "Carbon dioxide"),
    ("Which gas do people need to live?", "Oxygen"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci"),
    ("What is the opposite of hot?", "Cold"),
    ("What is the opposite of up?", "Down"),
    ("What season comes after winter?", "Spring"),
    ("What is the largest ocean?", "The Pacific"),
    ("What is the tallest mountain?", "Mount Everest"),
    ("What language is spoken in Brazil?", "Portuguese"),
]
# Never trained on: what is measured and sampled before and after.
HELD_OUT = [
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Russia?", "Moscow"),
    ("What is the opposite of day?", "Night"),
    ("Which planet do we live on?", "Earth"),
]


def encode_prompt(tokenizer, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def build_datum(tokenizer, question: str, fact: str) -> tinker.Datum:
    """Position i reads tokens[i] and predicts tokens[i + 1]; only the answer's tokens have a weight."""
    prompt = encode_prompt(tokenizer, question)
    answer = tokenizer.encode(PIRATE.format(fact), add_special_tokens=False)
    tokens = prompt + answer + [tokenizer.eos_token_id]
    weights = [0.0] * len(prompt) + [1.0] * (len(answer) + 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64"),
            "weights": tinker.TensorData(data=weights[1:], dtype="float32"),
        },
    )


def mean_loss(output: tinker.ForwardBackwardOutput, data: list[tinker.Datum]) -> float:
    """Per weighted token; the service's own loss is a sum."""
    weights = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in data)
    return output.metrics["loss:sum"] / weights


def sample_answers(sampler: tinker.SamplingClient, tokenizer) -> list[str]:
    params = tinker.SamplingParams(max_tokens=32, temperature=0.0)
    prompts = [tinker.ModelInput.from_ints(encode_prompt(tokenizer, q)) for q, _ in HELD_OUT]
    futures = [sampler.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]
    tokens = [future.result().sequences[0].tokens for future in futures]
    return [tokenizer.decode(t, skip_special_tokens=True).strip() for t in tokens]


def save_plot(losses: list[float], before: float, after: float, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, marker="o", label="training batch")
    axes.plot([0, len(losses)], [before, after], "s", label="held-out questions")
    axes.set(title="SFT", xlabel="step", ylabel="loss per token (nats)", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on a small visible task.")
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    print(f"loading {args.model} (its weights are unpacked the first time) ...", flush=True)
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(
        base_model=args.model, rank=args.rank, seed=args.seed
    ).result()
    tokenizer = training.get_tokenizer()
    train = [build_datum(tokenizer, *pair) for pair in TRAIN]
    held_out = [build_datum(tokenizer, *pair) for pair in HELD_OUT]

    base = service.create_sampling_client(base_model=args.model).result()
    answers_before = sample_answers(base, tokenizer)
    loss_before = mean_loss(training.forward(held_out, "cross_entropy").result(), held_out)

    rng, losses, queue = random.Random(args.seed), [], []
    progress = tqdm(range(args.steps), desc="SFT")
    for step in progress:
        while len(queue) < args.batch_size:
            queue += rng.sample(train, len(train))
        batch, queue = queue[: args.batch_size], queue[args.batch_size :]
        learning_rate = args.learning_rate * (1 - step / args.steps)
        # Both are sent before either is waited for; the service runs them in this order.
        backward = training.forward_backward(batch, "cross_entropy")
        update = training.optim_step(tinker.AdamParams(learning_rate=learning_rate))
        losses.append(mean_loss(backward.result(), batch))
        update.result()
        progress.set_postfix(loss=f"{losses[-1]:.3f}")

    loss_after = mean_loss(training.forward(held_out, "cross_entropy").result(), held_out)
    tuned = training.save_weights_and_get_sampling_client().result()
    answers_after = sample_answers(tuned, tokenizer)
    checkpoint = training.save_state("sft").result()
    picture = args.output / "sft.png"
    save_plot(losses, loss_before, loss_after, picture)

    lines = [f"SFT of {args.model}, {args.steps} steps, on questions it never saw:"]
    lines += [f"  loss per token   {loss_before:.3f} -> {loss_after:.3f}"]
    for (question, _), old, new in zip(HELD_OUT, answers_before, answers_after, strict=True):
        lines += [f"  {question}", f"    before: {old}", f"    after:  {new}"]
    lines += [f"  checkpoint       {checkpoint.path}", f"  picture          {picture.resolve()}"]
    summary = "\n".join(lines)
    (args.output / "sft.txt").write_text(summary + "\n")
    print(summary)


if __name__ == "__main__":
    main()
