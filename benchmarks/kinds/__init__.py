"""More strangers by kind: importing this adds them to the table of strangers.py."""

from importlib import import_module

__all__ = [  # noqa: F822  (modules of this folder)
    "audio", "contrastive", "finetuning", "generative", "language", "recommendation", "reinforcement", "scientific", "sequence", "series",
    "vision",
]  # fmt: skip

for _kind in __all__:
    import_module(f"{__name__}.{_kind}")
