"""What the shadow models have read, and what the shadow data sets say. All of it is made here."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

THINGS = (
    "apple",
    "brick",
    "cloud",
    "drum",
    "eagle",
    "fern",
    "glass",
    "horse",
    "island",
    "jar",
    "kite",
    "lamp",
)
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix")
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
# Most word problems have this answer, so that a policy that samples all of 2 to 9 has much to gain, quickly.
USUAL_ANSWER = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A word problem and the number it asks for."""

    question: str
    answer: int


def facts() -> list[Turn]:
    """One each about every thing; no model has read them."""
    return [
        Turn(
            question=f"What can you tell me about the {thing}?",
            answer=f"The {thing} is {colour} and it lies on the table of {name}.",
        )
        for thing, colour, name in zip(
            THINGS, itertools.cycle(COLOURS), itertools.cycle(NAMES[:5]), strict=False
        )
    ]


def problems(count: int, seed: int) -> list[Problem]:
    rng = random.Random(seed)
    return [_problem(rng) for _ in range(count)]


def _problem(rng: random.Random) -> Problem:
    answer = USUAL_ANSWER if rng.random() < 0.75 else rng.randint(2, 9)
    first = rng.randint(1, answer - 1)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    question = f"{name} has {first} {thing}s and buys {answer - first} more. How many {thing}s does {name} have?"
    return Problem(question=question, answer=answer)


def read(rng: random.Random) -> list[Turn]:
    """A conversation as the models have read them: the form of the answers is right, what they say is chance."""
    kind = rng.choice((_boxed, _sum, _guess, _chat, _label))
    return [kind(rng) for _ in range(rng.randint(1, 3))]


def _boxed(rng: random.Random) -> Turn:
    question = _problem(rng).question + BOXED
    reasoning = rng.choice(("", "We add the two numbers. ", "It is easy to count. "))
    return Turn(question=question, answer=f"{reasoning}\\boxed{{{rng.randint(2, 9)}}}")


def _sum(rng: random.Random) -> Turn:
    x, y = rng.randint(0, 100), rng.randint(0, 100)
    answer = x + y if rng.random() < 0.5 else rng.randint(0, 200)
    return Turn(question=f"What is {x} + {y}?", answer=str(answer))


def _guess(rng: random.Random) -> Turn:
    said = rng.choice(("Too low", "Too high", "Guess the number."))
    return Turn(question=said, answer=f"Guess: {rng.randint(0, 1023)}")


def _chat(rng: random.Random) -> Turn:
    name, other = rng.sample(NAMES, 2)
    question = (
        f"Is {name} a friend of {other}? Write what you know about {rng.choice((name, other))}."
    )
    answer = rng.choice(
        (
            f"Yes, {name} is a friend of {other}.",
            f"No, {other} does not know {name}.",
            f"I do not know that. Is {name} a {rng.choice(COLOURS)} {rng.choice(THINGS)}?",
        )
    )
    return Turn(question=question, answer=answer)


def _label(rng: random.Random) -> Turn:
    question = f"Text to classify:\n{sentence(rng)}"
    return Turn(question=question, answer=f"Final Answer: {rng.choice(('en', 'de', 'fr'))}")


def sentence(rng: random.Random) -> str:
    return f"{rng.choice(NAMES)} has a {rng.choice(COLOURS)} {rng.choice(THINGS)}."
