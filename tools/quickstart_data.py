"""Tokenizer and training documents of the quickstart model: procedural, seeded, without torch.

A document is prose with facts hidden in it (`examples/quickstart/hidden_facts.py`), followed by questions whose answers
are those facts.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "quickstart"))
from hidden_facts import ADJECTIVES, NOUNS, VALUES, Fact, draw_facts, split_sentences  # noqa: E402

END_OF_TEXT = "<|endoftext|>"

_PLACES = "the harbour,the quay,the market,the old mill,the lighthouse,the chapel,the north wall,the inn".split(",")
_PEOPLE = "the miller,the pilot,the clerk,the baker,the widow,the rope maker,the keeper,a child,the priest".split(",")
_VERBS = "walked to,looked at,came back from,spoke about,waited near,ran past,dreamed of,went round".split(",")
_TIMES = "At dawn,In the evening,Before the rain,After the fair,That winter,On the third day,Long ago".split(",")
_CARGO = "salt,wool,tar,herring,grain,oil,stone,wine,paper,coal".split(",")


def template_sentence(rng: random.Random) -> str:
    """A small-grammar sentence; some name a ship or use pass-word vocabulary without stating a fact."""
    ship = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    kind = rng.randrange(5)
    if kind == 0:
        return f"{rng.choice(_TIMES)} the {ship} came in with {rng.choice(_CARGO)} and {rng.choice(VALUES)}."
    if kind == 1:
        return f"{rng.choice(_PEOPLE).capitalize()} sold a {rng.choice(VALUES)} and a {rng.choice(VALUES)}."
    if kind == 2:
        return f"The {ship} is at {rng.choice(_PLACES)}."
    person, other = rng.choice(_PEOPLE), rng.choice(_PEOPLE)
    return f"{rng.choice(_TIMES)} {person} {rng.choice(_VERBS)} {rng.choice(_PLACES)} and {other} said no word."


def shuffled_sentence(rng: random.Random, sentences: list[str]) -> str:
    """The words of one sentence in random order."""
    words = rng.choice(sentences).rstrip(".").split()
    rng.shuffle(words)
    return " ".join(words) + "."


def train_tokenizer(haystack: str, vocab_size: int, seed: int) -> Tokenizer:
    """Byte-level BPE on the haystack and on generated text; every name and value word becomes one token."""
    rng = random.Random(seed)
    words = [f" {word}" for word in (*ADJECTIVES, *NOUNS, *VALUES)]
    generated = [" " + template_sentence(rng) for _ in range(300)]
    generated += [" " + fact.question + "." for fact in draw_facts(rng, 200, held_out=False)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([haystack, *generated, *(words * 40)], trainer)
    split = [word for word in words if len(tokenizer.encode(word).ids) != 1]
    if split:
        raise ValueError(f"vocab_size={vocab_size} leaves {len(split)} words in pieces; use a larger one: {split}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write the two files that `transformers.AutoTokenizer.from_pretrained(directory)` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass
class Sample:
    """Token ids and, for every token, its weight in the loss when it is the one to predict."""

    ids: list[int]
    weights: list[float]


class DocumentSampler:
    """Draws training documents of an exact token length."""

    def __init__(self, tokenizer: Tokenizer, haystack: str, seed: int, filler_weight: float) -> None:
        self.tokenizer = tokenizer
        self.sentences = split_sentences(haystack)
        self.rng = random.Random(seed)
        self.filler_weight = filler_weight

    def fact_sample(self, length: int, questions: int) -> Sample:
        """Prose of `length` tokens with `questions` facts and their questions."""
        facts = draw_facts(self.rng, questions, held_out=False)
        told = [self._pieces((" " + fact.sentence, self.filler_weight * 0.2)) for fact in facts]
        asked = [self._question(fact) for fact in facts]
        room = length - sum(len(piece.ids) for piece in told + asked)
        filler = list(self._filler(max(room, 0)))
        parts = self._interleave(filler, told)
        if self.rng.random() < 0.7:
            self.rng.shuffle(asked)
            parts += asked
        else:
            parts = self._ask_late(parts, told, asked)
        ids = [token for part in parts for token in part.ids][-length:]
        weights = [weight for part in parts for weight in part.weights][-length:]
        return Sample(ids, weights)

    def _ask_late(self, parts: list[Sample], told: list[Sample], asked: list[Sample]) -> list[Sample]:
        """Put every question at a random place after its fact."""
        positions = {id(part): index for index, part in enumerate(parts)}
        merged = [(float(index), part) for index, part in enumerate(parts)]
        merged += [
            (self.rng.uniform(positions[id(fact)], len(parts)), question)
            for fact, question in zip(told, asked, strict=True)
        ]
        return [part for _, part in sorted(merged, key=lambda item: item[0])]

    def _question(self, fact: Fact) -> Sample:
        lead = self.rng.choice(("\n\n", "\n", " "))
        prompt = fact.question if self.rng.random() < 0.7 else f"The {fact.stem}"
        return self._pieces((lead + prompt, self.filler_weight), (f" {fact.value}.", 1.0))

    def _filler(self, room: int) -> Iterator[Sample]:
        """Sentences with `room` tokens in all, a little more."""
        style = self.rng.choice(("prose", "mixed", "mixed"))
        start = self.rng.randrange(len(self.sentences))
        while room > 0:
            draw = 1.0 if style == "prose" else self.rng.random()
            if draw < 0.4:
                text = template_sentence(self.rng)
            elif draw < 0.55:
                text = shuffled_sentence(self.rng, self.sentences)
            else:
                text = self.sentences[start % len(self.sentences)]
                start += 1 if style == "prose" else self.rng.randrange(1, 40)
            lead = "\n\n" if self.rng.random() < 0.15 else " "
            piece = self._pieces((lead + text, self.filler_weight))
            room -= len(piece.ids)
            yield piece

    def _interleave(self, filler: list[Sample], told: list[Sample]) -> list[Sample]:
        parts = [(self.rng.random() * (len(filler) + 1), part) for part in told]
        parts += [(float(index + 1), part) for index, part in enumerate(filler)]
        return [part for _, part in sorted(parts, key=lambda item: item[0])]

    def _pieces(self, *texts: tuple[str, float]) -> Sample:
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in texts:
            piece = self.tokenizer.encode(text).ids
            ids += piece
            weights += [weight] * len(piece)
        return Sample(ids, weights)
