"""Facts to hide in a text, and the questions about them. Seeded; no torch.

    fact      The pass word of the Silver Heron is copper lantern thistle.
    question  What is the pass word of the Silver Heron? The pass word of the Silver Heron is
    answer    copper lantern thistle.

A fifth of all ship names is kept for evaluation and is never the subject of a fact in training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HELD_OUT_EVERY = 5
VALUE_WORDS = 3

ADJECTIVES = (
    "Amber Ancient Black Blue Brave Bright Broken Bronze Calm Crimson Distant Early Eastern Faithful Gentle Golden "
    "Green Grey Hidden Hollow Humble Iron Ivory Jolly Lonely Lucky Merry Misty Noble Northern Patient Pearl Proud "
    "Quiet Rapid Red Restless Royal Scarlet Silent Silver Southern Stormy Swift Velvet Wandering White Winter"
).split()
NOUNS = (
    "Albatross Anchor Arrow Badger Bell Bishop Castle Comet Crane Crown Dolphin Dove Dragon Eagle Falcon Fox Gull "
    "Harp Hawk Heron Horse Hunter Lantern Lark Lion Maiden Meadow Mermaid Otter Owl Petrel Pilgrim Raven Robin Rose "
    "Salmon Seal Shepherd Sparrow Star Swallow Swan Thistle Tiger Turtle Whale Widow Wolf"
).split()
VALUES = (
    "acorn almond anvil apple apron basil basket beetle biscuit blanket bottle bramble bucket butter button cabbage "
    "candle canvas carpet carrot cedar cello cherry chestnut clover cobalt cocoa copper coral cotton cradle cricket "
    "daisy feather fennel fiddle garlic ginger goblet hammer hazel honey indigo ivy jasmine juniper kettle ladder "
    "lemon lilac linen lobster magnet mango maple marble medal mirror mustard needle nettle nutmeg olive onion orchid "
    "oyster paddle parsley pebble pepper pickle pigeon plum poppy puppet quartz quill raisin ribbon saddle "
    "saffron scissors sickle spindle spoon sugar teapot thimble timber tulip turnip violet walnut whistle willow zebra"
).split()


@dataclass(frozen=True)
class Fact:
    """One ship and its pass word."""

    key: str
    value: str

    @property
    def stem(self) -> str:
        """The words right before the value, the same in the fact and in the question."""
        return f"pass word of the {self.key} is"

    @property
    def sentence(self) -> str:
        return f"The {self.stem} {self.value}."

    @property
    def question(self) -> str:
        """The prompt that the answer `" " + value + "."` continues."""
        return f"What is the pass word of the {self.key}? The {self.stem}"


@dataclass(frozen=True)
class Question:
    """A prompt to append to a context, the text that must follow, and where its fact lies (0 start, 1 end)."""

    prompt: str
    answer: str
    depth: float


def is_held_out(adjective: int, noun: int) -> bool:
    """Whether the ship with these word indices is kept for evaluation."""
    return (adjective + noun) % HELD_OUT_EVERY == 0


def draw_facts(rng: random.Random, count: int, held_out: bool) -> list[Fact]:
    """`count` facts on different ships, all from the evaluation names or all from the training names."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        adjective, noun = rng.randrange(len(ADJECTIVES)), rng.randrange(len(NOUNS))
        if is_held_out(adjective, noun) == held_out:
            keys[f"{ADJECTIVES[adjective]} {NOUNS[noun]}"] = None
    return [Fact(key, " ".join(rng.sample(VALUES, VALUE_WORDS))) for key in keys]


def split_sentences(text: str) -> list[str]:
    """The sentences of a prose text, paragraph breaks dropped."""
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+", text) if part.strip()]


def hide_facts(
    haystack: str, *, seed: int, count_tokens: Callable[[str], int], tokens: int, depths: Sequence[float]
) -> tuple[str, list[Question]]:
    """A text of about ``tokens`` tokens, the beginning of ``haystack`` with one fact hidden at every depth.

    The facts are on names never used in training, with random values. Depth 0 puts a fact before the first sentence,
    depth 1 after the last.

    Returns:
        The text, and the questions in the order of ``depths``.
    """
    rng = random.Random(seed)
    facts = draw_facts(rng, len(depths), held_out=True)
    budget = tokens - sum(count_tokens(" " + fact.sentence) for fact in facts)
    paragraphs, used = [], 0
    for paragraph in haystack.strip().split("\n\n"):
        kept = []
        for sentence in split_sentences(paragraph):
            used += count_tokens(" " + sentence)
            if used > budget:
                break
            kept.append(sentence)
        paragraphs.append(kept)
    total = sum(map(len, paragraphs))
    placed = sorted(zip([round(depth * total) for depth in depths], facts, strict=True), key=lambda item: item[0])
    text = _insert(paragraphs, placed)
    questions = [Question(fact.question, f" {fact.value}.", depth) for depth, fact in zip(depths, facts, strict=True)]
    return text, questions


def _insert(paragraphs: list[list[str]], placed: list[tuple[int, Fact]]) -> str:
    """The text with every fact before the sentence of its index (after the last one, for an index past it)."""
    pending, index, lines = list(placed), 0, []
    for paragraph in paragraphs:
        line = []
        for sentence in paragraph:
            while pending and pending[0][0] <= index:
                line.append(pending.pop(0)[1].sentence)
            line.append(sentence)
            index += 1
        if line:
            lines.append(line)
    lines[-1] += [fact.sentence for _, fact in pending]
    return "\n\n".join(" ".join(line) for line in lines)
