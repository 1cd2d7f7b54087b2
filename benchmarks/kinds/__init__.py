"""More strangers by kind: importing this adds them to the table of strangers.py."""

from benchmarks.kinds import (
    audio,
    contrastive,
    finetuning,
    generative,
    language,
    recommendation,
    reinforcement,
    scientific,
    sequence,
    series,
    vision,
)

__all__ = [
    "audio",
    "contrastive",
    "finetuning",
    "generative",
    "language",
    "recommendation",
    "reinforcement",
    "scientific",
    "sequence",
    "series",
    "vision",
]
