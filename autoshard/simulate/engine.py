"""The begin and end times of tasks: every stream runs its tasks in order, and several streams can share a link.

    a task begins     when the preceding task of its stream has ended, and all tasks that it waits for
    it ends           after its seconds of work, done at rate 1/n while n streams use its link (rate 1 without a link), and at 1/(1 + l s)
                      of that while kernels and collectives of l links run beside each other
    in the background a task also begins only where its link is not in use by a stream that is not in the background; beside kernels, it
                      lets the next of those go first where it may (cost.Gaps)

So kernels of a seconds beside collectives of b take max(a, b) + s min(a, b). In the list, a task comes after all tasks that it waits for.
Without shared links and with s = 0 one pass over the list is enough: begin = max(end of the stream's preceding task, ends of the tasks
waited for), in time linear in the length of the list.
"""

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from autoshard.cost import Gaps


class Runnable(Protocol):
    @property
    def seconds(self) -> float: ...
    @property
    def stream(self) -> int: ...
    @property
    def after(self) -> tuple[int, ...]: ...


class Times(NamedTuple):
    """Per task, in seconds from the start. `cause`: the task whose end it had to wait for last, -1 where it began at 0."""

    begin: list[float]
    end: list[float]
    cause: list[int]


def run_tasks(
    tasks: Sequence[Runnable], links: Sequence[int] | None = None, *, slowed: float = 0.0, background: Container[int] = ()
) -> Times:
    """Times of all tasks. links: per stream the link that it uses, -1 for none; streams that name the same link share it. slowed: s, of
    kernels (stream 0) and of the tasks of streams with links. background: streams with links."""
    used = sorted({task.stream for task in tasks})
    of = {stream: -1 if links is None or stream >= len(links) else links[stream] for stream in used}
    in_use = [link for link in of.values() if link >= 0]
    plain = len(in_use) == len(set(in_use)) and not (slowed and in_use and 0 in of)
    return _one_pass(tasks) if plain else _events(tasks, of, slowed, background)


def run_in_turn(seconds: Iterable[float]) -> Times:
    """Times of tasks that run one after the other."""
    end = list(accumulate(seconds))
    return Times([0.0, *end[:-1]], end, list(range(-1, len(end) - 1)))


def _one_pass(tasks: Sequence[Runnable]) -> Times:
    begin, end, cause = [0.0] * len(tasks), [0.0] * len(tasks), [-1] * len(tasks)
    free: dict[int, tuple[float, int]] = {}
    for i, task in enumerate(tasks):
        at, why = free.get(task.stream, (0.0, -1))
        for j in task.after:
            if end[j] > at or why < 0:
                at, why = max(at, end[j]), j
        begin[i], cause[i] = at, why
        end[i] = at + task.seconds
        free[task.stream] = (end[i], i)
    return Times(begin, end, cause)


def _events(tasks: Sequence[Runnable], link_of: dict[int, int], slowed: float, background: Container[int]) -> Times:
    """Event by event; between two events every running task has a constant rate."""
    begin, end, cause = [0.0] * len(tasks), [math.nan] * len(tasks), [-1] * len(tasks)
    queues: dict[int, list[int]] = {stream: [] for stream in sorted(link_of, key=lambda stream: (stream in background, stream))}
    unmet = [0] * len(tasks)  # how many of those that a task waits for have not ended
    readers: list[list[int]] = [[] for _ in tasks]
    after, work = [task.after for task in tasks], [task.seconds for task in tasks]
    for i, task in enumerate(tasks):
        queues[task.stream].append(i)
        unmet[i] = len(after[i])
        for j in after[i]:
            readers[j].append(i)
    place = dict.fromkeys(queues, 0)
    free: dict[int, tuple[float, int]] = dict.fromkeys(queues, (0.0, -1))
    waits = {stream: stream in background for stream in queues}
    urgent = dict.fromkeys(link_of.values(), 0)  # streams that run on a link and aren't in the background
    patient = _Patient(tasks, link_of, background)
    left: dict[int, float] = {}  # running task of a stream: seconds of work left
    now, ended = 0.0, -1  # the last task that did
    known: dict[tuple[int, ...], list[float]] = {}  # by the streams that run: how long a second of each one's work takes

    def start() -> None:
        for stream, queue in queues.items():
            if stream in left or place[stream] >= len(queue) or unmet[i := queue[place[stream]]]:
                continue
            link = link_of[stream]
            if waits[stream] and (urgent[link] or 0 in left and patient.stands_back(i, place[0], left[0])):
                continue
            at, why = free[stream]
            for j in after[i]:
                if end[j] > at or why < 0:
                    at, why = max(at, end[j]), j
            if waits[stream] and now > at:
                why = ended
            begin[i], cause[i], left[stream] = now, why, work[i]
            urgent[link] += not waits[stream]

    while True:
        start()
        if not left:
            break
        running = tuple(left)
        if running not in known:
            known[running] = _shares(running, link_of, slowed)
        shares = known[running]
        lasts = [seconds * share for seconds, share in zip(left.values(), shares)]
        step = min(lasts)
        now += step
        for stream, share, seconds in zip(running, shares, lasts):
            if seconds > step:
                left[stream] -= step / share
                continue
            i = queues[stream][place[stream]]  # it ends now, exactly
            end[i], free[stream] = now, (now, i)
            place[stream] += 1
            urgent[link_of[stream]] -= not waits[stream]
            ended = i
            del left[stream]
            for k in readers[i]:
                unmet[k] -= 1
    if (waiting := next((i for i, e in enumerate(end) if math.isnan(e)), None)) is not None:
        raise ValueError(f"task {waiting} waits for ever: the list holds it before a task that it waits for")
    return Times(begin, end, cause)


def _shares(running: Collection[int], link_of: Mapping[int, int], slowed: float) -> list[float]:
    """Per running stream the seconds that one second of its work takes."""
    active = Counter(link_of[stream] for stream in running if link_of[stream] >= 0)
    beside = 1.0 + slowed * len(active) if 0 in running else 1.0
    return [active[link] * beside if (link := link_of[s]) >= 0 else beside if s == 0 else 1.0 for s in running]


class _Patient:
    """Tasks in the background, which let others of their link go first while no kernel needs them."""

    def __init__(self, tasks: Sequence[Runnable], link_of: dict[int, int], background: Container[int]):
        self.tasks, self.link_of = tasks, link_of
        self.kernels = [0.0]  # seconds of the first n kernels
        self.until = [math.inf] * len(tasks)  # seconds of kernels by which it has to end
        passed, last = [0] * len(tasks), dict.fromkeys(link_of, 0)  # kernels that end before a task, and the last one of its stream, do
        begins: dict[int, set[int]] = {link: set() for link in link_of.values()}
        for i, task in enumerate(tasks):
            passed[i] = max(last[task.stream], max([passed[j] for j in task.after], default=0))
            if task.stream == 0:
                self.kernels.append(self.kernels[-1] + task.seconds)
                self.until[i] = self.kernels[-1]
                passed[i] = len(self.kernels) - 1
            elif task.stream not in background and task.seconds:
                begins[link_of[task.stream]].add(passed[i])
            last[task.stream] = passed[i]
        behind: dict[int, float] = {}  # in the background, when the task behind has to begin
        for i in range(len(tasks) - 1, -1, -1):
            task, until = tasks[i], self.until[i]
            if task.stream in background:
                until = self.until[i] = min(until, behind.get(task.stream, math.inf))
                behind[task.stream] = until - task.seconds
            until -= task.seconds
            for j in task.after:
                if until < self.until[j] and tasks[j].stream:
                    self.until[j] = until
        self.gaps = {link: Gaps(sorted(counts), self.kernels) for link, counts in begins.items()}

    def stands_back(self, i: int, kernels: int, left: float) -> bool:
        """Whether task i waits now, as so many kernels have ended and the running one has seconds left."""
        task = self.tasks[i]
        return self.gaps[self.link_of[task.stream]].stands_back(kernels, left, task.seconds, self.until[i])
