"""What torch's caching allocator of CUDA memory reserves for a sequence of allocations and frees.

The rules are those of pytorch/pytorch@eb42ad6, c10/cuda/CUDACachingAllocator.cpp; the function that has each is named with it:

    sizes      512 bytes and multiples of it (kMinBlockSize, line 116; round_size); up to 1 MiB from the small pool (kSmallSize, get_pool)
    segments   2 MiB for the small pool (kSmallBuffer), 20 MiB for up to 10 MiB (kLargeBuffer, kMinLargeAlloc), else multiples of 2 MiB
               (kRoundLarge; get_allocation_size); expandable ones grow by pages of 2 or 20 MiB, one segment per stream and pool
    reuse      the smallest free block of the stream and pool that is large enough, the lowest address first (BlockComparatorSize,
               get_free_block); what is left of it is split off if it is 512 bytes of a small or expandable block, or more than 1 MiB of
               a large one (should_split); free neighbours merge (try_merge_blocks)
               blocks of max_split bytes or more go to no smaller request, and to larger ones with 20 MiB of waste at most
    limit      before more is reserved than there is, blocks that are segments of their own are released: one that is large enough, else all
               (release_available_cached_blocks, release_cached_blocks); beyond a share of the limit, those unused for longest
               (garbage_collect_cached_blocks)
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIN_BLOCK, SMALL, SMALL_BUFFER, LARGE_BUFFER, MIN_LARGE, ROUND_LARGE = 512, 2**20, 2 * 2**20, 20 * 2**20, 10 * 2**20, 2 * 2**20
Pool = tuple[int, bool]  # a stream, and whether it is the small one
Used = dict[int, tuple[int, Sequence[Mapping[str, Any]]]]  # blocks by address: bytes, and the stack


class OutOfMemory(ValueError):
    """More was asked for than the limit leaves once all that can be released is."""


@dataclass(eq=False)
class MemoryBlock:
    """Of a segment, beside its neighbours."""

    pool: Pool
    address: int
    size: int
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    is_free: bool = False
    freed_at: int = 0  # in calls

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


@dataclass
class CachingAllocator:
    """Sizes in bytes. limit: what can be reserved. Of PYTORCH_CUDA_ALLOC_CONF: collect_above, a share of the limit, is its
    garbage_collection_threshold, 0: never; max_split, its max_split_size_mb: blocks of that size or more are not split."""

    limit: int | None = None
    expandable: bool = False
    collect_above: float = 0.0
    max_split: float = math.inf
    reserved: int = 0
    allocated: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0
    calls: int = 0
    ends: dict[Pool, MemoryBlock] = field(default_factory=dict)  # of expandable segments: their last blocks
    free_blocks: dict[Pool, list[tuple[int, int, MemoryBlock]]] = field(default_factory=dict)  # sorted by size and address
    used: dict[Any, MemoryBlock] = field(default_factory=dict)
    next_address: int = 0
    trace: list[dict[str, Any]] = field(default_factory=list)  # as torch records it

    def allocate(self, name: Any, size: int, stream: int = 0) -> None:
        """`name` is one that is not in use. OutOfMemory where it can't be had."""
        self.calls += 1
        size = _rounded(size)
        pool = (stream, size <= SMALL)
        block = self._best_fit(pool, size) or self._more(pool, size)
        left = block.size - size
        if left >= MIN_BLOCK if pool[1] or self.expandable else left > SMALL and size < self.max_split:
            rest = MemoryBlock(pool, block.address + size, left, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            elif self.ends.get(pool) is block:
                self.ends[pool] = rest
            block.size, block.after = size, rest
            self._put(rest)
        self.used[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._record("alloc", block)

    def free(self, name: Any) -> None:
        """KeyError for a name that is not in use."""
        block = self.used.pop(name)
        self.allocated -= block.size
        self._record("free_requested", block)
        self._record("free_completed", block)
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take(other)
                first, second = (other, block) if other is block.before else (block, other)
                merged = MemoryBlock(block.pool, first.address, first.size + second.size, first.before, second.after)
                if self.ends.get(block.pool) is second:
                    self.ends[block.pool] = merged
                if merged.before is not None:
                    merged.before.after = merged
                if merged.after is not None:
                    merged.after.before = merged
                block = merged
        self._put(block)

    def begin_with(self, pool: Pool, address: int, size: int, used: Sequence[tuple[int, int]]) -> None:
        """A segment that is there already, with its used blocks (address, size) in order, named by their addresses."""
        at, before = address, None
        for start, n in [*used, (address + size, 0)]:
            for where, length, is_used in ((at, start - at, False), (start, n, True)):
                if length:
                    block = MemoryBlock(pool, where, length, before)
                    if before is not None:
                        before.after = block
                    before = block
                    if is_used:
                        self.used[where] = block
                        self.allocated += length
                    else:
                        self._put(block)
            at = start + n
        if self.expandable and before is not None:
            self.ends[pool] = before
        self.reserved += size
        self.next_address = max(self.next_address, address + size)
        self.peak_reserved, self.peak_allocated = max(self.peak_reserved, self.reserved), max(self.peak_allocated, self.allocated)

    def empty_cache(self) -> None:
        """Release all segments that are free."""
        for block in [block for blocks in self.free_blocks.values() for _, _, block in blocks if block.is_segment]:
            self._release_segment(block)

    def run(self, events: Iterable[tuple[Any, int] | tuple[Any, int, int]]) -> CachingAllocator:
        """Events are (name, size) or (name, size, stream); a size of 0 frees."""
        for name, size, *stream in events:
            if size:
                self.allocate(name, size, *stream)
            else:
                self.free(name)
        return self

    def snapshot(self) -> dict[str, Any]:
        """As torch records it, for pytorch.org/memory_viz: the segments as they are now, and the trace."""
        free = [block for blocks in self.free_blocks.values() for _, _, block in blocks]
        segments: list[dict[str, Any]] = []
        for block in sorted((block for block in (*self.used.values(), *free) if block.before is None), key=lambda block: block.address):
            first: MemoryBlock = block
            blocks: list[dict[str, Any]] = []
            while block is not None:
                blocks.append({"address": block.address, "size": block.size, "requested_size": 0 if block.is_free else block.size,
                               "state": "inactive" if block.is_free else "active_allocated", "frames": []})  # fmt: skip
                block = block.after  # type: ignore[assignment]
            used = sum(one["size"] for one in blocks if one["state"] != "inactive")
            segments.append({"device": 0, "address": first.address, "stream": first.pool[0], "total_size": sum(b["size"] for b in blocks),
                             "allocated_size": used, "active_size": used, "segment_type": "small" if first.pool[1] else "large",
                             "is_expandable": self.expandable, "blocks": blocks, "frames": []})  # fmt: skip
        return {"segments": segments, "device_traces": [self.trace], "allocator_settings": {"expandable_segments": self.expandable}}

    def _record(self, action: str, block: MemoryBlock) -> None:
        self.trace.append({"action": action, "addr": block.address, "size": block.size, "stream": block.pool[0], "frames": []})

    def _put(self, block: MemoryBlock) -> None:
        block.is_free, block.freed_at = True, self.calls
        insort(self.free_blocks.setdefault(block.pool, []), (block.size, block.address, block))

    def _take(self, block: MemoryBlock) -> None:
        blocks = self.free_blocks[block.pool]
        del blocks[bisect_left(blocks, (block.size, block.address))]
        block.is_free = False

    def _best_fit(self, pool: Pool, size: int) -> MemoryBlock | None:
        blocks = self.free_blocks.get(pool, [])
        for _, _, block in blocks[bisect_left(blocks, (size,)) :]:
            # the end of an expandable segment counts as large as it can grow: any other block that is large enough fits better
            if self.ends.get(pool) is not block or block is blocks[-1][2]:
                if block.size >= (self.max_split if size < self.max_split else size + LARGE_BUFFER) and self.max_split < math.inf:
                    return None  # it can't be split, or too much of it would be unused
                self._take(block)
                return block
        return None

    def _more(self, pool: Pool, size: int) -> MemoryBlock:
        """A block of a new segment, or of an expandable one that grows."""
        end = self.ends.get(pool) if self.expandable else None
        tail = end.size if end is not None and end.is_free else 0
        page = SMALL_BUFFER if pool[1] else LARGE_BUFFER
        large = LARGE_BUFFER if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        more = -(-(size - tail) // page) * page if self.expandable else SMALL_BUFFER if pool[1] else large
        if self.limit is not None and self.collect_above and self.reserved + more > self.collect_above * self.limit:
            self._collect(self.reserved + more - int(self.collect_above * self.limit))
        if self.limit is not None and self.reserved + more > self.limit:
            self._release(pool, more)
        if self.limit is not None and self.reserved + more > self.limit:
            raise OutOfMemory(f"{size} bytes can't be allocated: {self.reserved} of {self.limit} are reserved, {self.allocated} allocated")
        self.reserved += more
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if end is not None and self.ends.get(pool) is end and tail:
            self._take(end)
            self._record("segment_map", MemoryBlock(pool, end.address + end.size, more))
            end.size += more
            return end
        follows = end if end is not None and self.ends.get(pool) is end else None
        block = MemoryBlock(pool, self.next_address if follows is None else follows.address + follows.size, more, follows)
        if follows is not None:
            follows.after = block
        else:
            self.next_address += 2**50 if self.expandable else more
        self._record("segment_map" if self.expandable else "segment_alloc", block)
        if self.expandable:
            self.ends[pool] = block
        return block

    def _release(self, pool: Pool, wanted: int) -> None:
        """One segment that is free and large enough, the smallest; else all that are."""
        large = [block for _, _, block in self.free_blocks.get(pool, []) if block.is_segment and block.size >= wanted]
        for block in large[:1]:
            self._release_segment(block)
        if self.limit is not None and self.reserved + wanted > self.limit:
            self.empty_cache()

    def _collect(self, wanted: int) -> None:
        """Segments that are free, those unused for longest first, until `wanted` bytes are released."""
        every = [block for blocks in self.free_blocks.values() for _, _, block in blocks if block.is_segment and not block.pool[1]]
        for block in sorted(every, key=lambda block: block.freed_at):
            if wanted <= 0:
                return
            wanted -= block.size
            self._release_segment(block)

    def _release_segment(self, block: MemoryBlock) -> None:
        self._take(block)
        self._record("segment_unmap" if self.expandable else "segment_free", block)
        self.reserved -= block.size
        if self.ends.get(block.pool) is block:
            del self.ends[block.pool]


def _rounded(size: int) -> int:
    return max(-(-size // MIN_BLOCK), 1) * MIN_BLOCK


def replayed(snapshot: Mapping[str, Any], device: int = 0, **how: Any) -> tuple[CachingAllocator, int]:
    """A memory snapshot's trace (the "device_traces" of torch's, of one device) run again from the segments that it began with;
    and the peak of bytes that were reserved then. how: fields of CachingAllocator, `expandable=True` to see what that would change."""
    segments, used, peak, _ = _rewound(snapshot, device)
    allocator, kinds = CachingAllocator(**how), {s["address"]: s.get("segment_type") == "small" for s in snapshot["segments"]}
    blocks = sorted((at, _rounded(n)) for at, (n, _) in used.items())
    for address, (size, stream) in sorted(segments.items()):
        inside = [(at, n) for at, n in blocks if address <= at < address + size]
        small = size == SMALL_BUFFER if not allocator.expandable else kinds.get(address, size <= SMALL_BUFFER)
        allocator.begin_with((stream, small), address, size, inside)
    before = ""
    for entry in _trace(snapshot, device):
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            allocator.allocate(address, int(entry["size"]), int(entry.get("stream", 0)))
        elif action == "free_completed" and address in allocator.used:
            allocator.free(address)
        elif action in ("segment_free", "segment_unmap") and before != action:
            allocator.empty_cache()
        before = action
    return allocator, peak


def _trace(snapshot: Mapping[str, Any], device: int) -> Sequence[Mapping[str, Any]]:
    traces = snapshot.get("device_traces") or []
    return traces[device] if len(traces) > device else []


def _remove(segments: dict[int, tuple[int, int]], address: int, size: int) -> None:
    """Remove `size` bytes that begin at `address`: a segment, or the end of an expandable one."""
    for start, (length, stream) in segments.items():
        if start <= address < start + length:
            if address > start:
                segments[start] = address - start, stream
            else:
                del segments[start]
            return


def _rewound(snapshot: Mapping[str, Any], device: int) -> tuple[dict[int, tuple[int, int]], Used, int, Used]:
    """Segments (address: size and stream) and used blocks before a snapshot's trace; within it the reserved peak, and the blocks when most
    was used: what the snapshot says of its end, and the trace backwards."""
    segments: dict[int, tuple[int, int]] = {}
    used: Used = {}
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        segments[segment["address"]] = int(segment["total_size"]), int(segment.get("stream", 0))
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                used[at] = int(block["size"]), block.get("frames") or ()
            at += int(block["size"])
    reserved = peak = sum(size for size, _ in segments.values())
    allocated = most = sum(size for size, _ in used.values())
    at_peak = dict(used)
    for entry in reversed(_trace(snapshot, device)):
        action, address, size = entry["action"], entry["addr"], int(entry.get("size", 0))
        if action == "alloc":
            allocated -= used.pop(address, (0, ()))[0]
        elif action == "free_completed":
            used[address] = size, entry.get("frames") or ()
            allocated += size
            if allocated > most:
                most, at_peak = allocated, dict(used)
        elif action in ("segment_alloc", "segment_map"):
            _remove(segments, address, size)
            reserved -= size
        elif action in ("segment_free", "segment_unmap"):
            segments[address] = size, int(entry.get("stream", 0))
            reserved += size
        peak = max(peak, reserved)
    return segments, used, peak, at_peak


def peak_of_snapshot(snapshot: Mapping[str, Any], device: int = 0) -> tuple[int, list[tuple[int, Sequence[Mapping[str, Any]]]]]:
    """Bytes reserved at most within a snapshot's trace; and the sizes and stacks of what was alive when most was allocated."""
    _, _, reserved, at_peak = _rewound(snapshot, device)
    return reserved, list(at_peak.values())
