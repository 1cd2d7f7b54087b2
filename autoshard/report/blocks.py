"""Parameters grouped by block, with blocks of equal layouts folded into one row: "h.0 .. h.11".

The block of a parameter is its name up to the first number: `h.3` for `h.3.attn.c_attn.weight`. Two blocks of one family (`h.*`) are
equal when their parameters have the same names within the block, layouts, shapes and bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.graph import grouped
from autoshard.solution import flat


@dataclass(frozen=True)
class Section:
    """One block, several equal ones, or the parameters outside blocks (no title). Per block: rows, bytes, mean seconds."""

    blocks: tuple[str, ...]  # equal ones, the first first; "" for the parameters outside
    rows: dict[str, dict]  # the rest of the name -> layout, shape, dtype, local_bytes
    seconds: float | None
    row_seconds: dict[str, float]  # outside blocks: the seconds of a module (`wte`), by its first parameter

    @property
    def title(self) -> str:
        """`h.0 .. h.11: same`, runs of numbers joined, at most three runs."""
        family, numbers = family_of(self.blocks[0]), sorted(int(block.rpartition(".")[2]) for block in self.blocks if block)
        runs: list[list[int]] = []
        for number in numbers:
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        told = [f"{family}{a}" if a == b else f"{family}{a} .. {family}{b}" for a, b in runs[:3]]
        more = f" and {sum(b - a + 1 for a, b in runs[3:])} more" if len(runs) > 3 else ""
        return ", ".join(told) + more + (": same" if len(self.blocks) > 1 else "")

    @property
    def local_bytes(self) -> float:
        return sum(row.get("local_bytes") or 0 for row in self.rows.values())


def sections(parameters: Mapping[str, dict], block_seconds: Mapping[str, object]) -> list[Section]:
    """Sections in the order of the parameters; equal blocks are at the place of the first of them."""
    blocks: dict[str, dict[str, dict]] = {}
    for name, row in parameters.items():
        block, rest = split(name)
        blocks.setdefault(block, {})[rest] = row
    alike = grouped(((block != "", family_of(block), repr(rows)), block) for block, rows in blocks.items())
    return [
        Section(
            tuple(equal),
            blocks[equal[0]],
            _mean([_total(block_seconds.get(block)) for block in equal if block]),
            _row_seconds(blocks[""], block_seconds) if equal == [""] else {},
        )
        for equal in alike.values()
    ]


def _row_seconds(rows: Mapping[str, dict], block_seconds: Mapping[str, object]) -> dict[str, float]:
    first = {name.split(".")[0]: name for name in reversed(list(rows))}
    totals = {name: _total(block_seconds.get(module)) for module, name in first.items()}
    return {name: seconds for name, seconds in totals.items() if seconds is not None}


def seconds_elsewhere(parameters: Mapping[str, dict], block_seconds: Mapping[str, object]) -> float:
    """Seconds that `sections` leaves out: those of blocks and modules without parameters."""
    known = {split(name)[0] or name.split(".")[0] for name in parameters}
    return sum(_total(tree) or 0.0 for block, tree in block_seconds.items() if block not in known)


def split(name: str) -> tuple[str, str]:
    """`h.3.attn.weight` -> ("h.3", "attn.weight"); ("", name) where there is no number."""
    parts = name.split(".")
    k = next((k for k, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return ("", name) if k is None else (".".join(parts[: k + 1]), ".".join(parts[k + 1 :]))


def family_of(block: str) -> str:
    """`h.` of h.3; "" of 3."""
    return block.removesuffix(block.rpartition(".")[2])


def in_a_block(name: str) -> tuple[str, str]:
    """A parameter's name without the number of its block: the family of the block and the rest."""
    block, rest = split(name)
    return family_of(block), rest


def named(names: Sequence[str]) -> str:
    """`h.0.w and 11 more blocks` for names that differ in their block alone."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more blocks"


def _total(tree: object) -> float | None:
    parts = [part for _, part in flat(tree)]
    return sum(parts) if parts else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
