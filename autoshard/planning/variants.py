"""What may be tried to answer a question: the records that the kinds of variants and the search share.

A kind of variant is one function in a file of its own, and a row of `KINDS` in search.py:

    def kind(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]

It yields the variants one after the other, in the order in which they are tried. After each, `tried` ends with what became of it, so
that the next may depend on it. The last variant that it yields is meant to be the answer, or where it competes the fastest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.planning.instance import Instance
from autoshard.planning.options import Infeasible, NoAnswer
from autoshard.planning.overlapped import OverlappedPlan
from autoshard.planning.question import Question
from autoshard.solvers import Answer

FULL = 0.9  # of the memory limit, from which on more room may make a faster plan


@dataclass(frozen=True)
class Variant:
    """A way to change a question."""

    note: str  # what is special about it; said in the refusal of a last resort
    transform: Callable[[Question], Question] = lambda question: question
    share: float = 1.0  # of the time that is left
    is_last_resort: bool = False
    competes: bool = False  # with those before it: the fastest is the answer


@dataclass(frozen=True, eq=False)
class Answered:
    """A question as it was asked in the end, and its best choice with the proof: all that a plan is described from."""

    question: Question
    instance: Instance
    answer: Answer
    baselines: Mapping[str, dict] = field(default_factory=dict)
    starts: Sequence[tuple[int, ...]] = ()  # the choices of those that fit
    overlapped: OverlappedPlan | None = None  # for that objective; its answer has the choice

    @property
    def plan(self) -> Answer:
        """The answer whose choice is the plan."""
        return self.answer if self.overlapped is None else self.overlapped.answer

    @property
    def seconds(self) -> float:
        """What the objective counts."""
        return self.answer.cost if self.overlapped is None else self.overlapped.seconds

    @property
    def recomputes(self) -> bool:
        """Whether a saved value is recomputed or offloaded."""
        return "saved" in self.question.assumptions

    def as_interrupted(self) -> "Answered":
        """The same, as Ctrl-C left it: nothing further is looked for."""
        plan = replace(self.plan, interrupted=True)
        return replace(self, answer=plan) if self.overlapped is None else replace(self, overlapped=replace(self.overlapped, answer=plan))

    @property
    def choice(self) -> tuple[int, ...]:
        assert self.plan.choice is not None
        return self.plan.choice


@dataclass(frozen=True)
class Tried:
    """What became of a variant: an answer, a refusal, or neither where Ctrl-C ended it."""

    variant: Variant
    question: Question  # the variant of it
    answered: Answered | None = None
    refusal: Infeasible | None = None

    @property
    def has_no_plan(self) -> bool:
        """Whether there is none, or none was found with time left: where the time ran out, another variant would have no more of it."""
        return self.refusal is not None and not (isinstance(self.refusal, NoAnswer) and self.question.is_over)

    @property
    def is_interrupted(self) -> bool:
        return self.answered.plan.interrupted if self.answered is not None else self.refusal is None


Kind = Callable[[Question, Sequence[Tried]], Iterator[Variant]]


def is_short(question: Question, one: Tried) -> bool:
    """Whether memory is too short for a variant, or binds its plan, and there is time for another one that needs less."""
    limit = question.options.memory_limit
    is_full = limit is not None and one.answered is not None and (one.answered.plan.peak or 0.0) > FULL * limit
    return (one.has_no_plan or is_full) and not question.is_over
